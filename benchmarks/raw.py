"""What the machine can do at best: the lines that every other figure is measured against."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BLOCK = 8 << 20


def write(path: Path, nbytes: int, threads: int) -> float:
    """Seconds to write ``nbytes`` past the page cache, where the file system lets us, and make them durable."""
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))
    file = _open(path)
    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            starts = range(0, nbytes // BLOCK * BLOCK, BLOCK)
            written = sum(pool.map(lambda start: os.pwrite(file, block, start), starts))
        os.fdatasync(file)
        seconds = time.perf_counter() - began
    finally:
        os.close(file)
        path.unlink()
    return seconds * nbytes / written


def copy_from_device(nbytes: int, repeats: int = 5) -> float:
    """Seconds to copy ``nbytes`` from the GPU into pinned memory, in one piece, at best."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return min(_copy(source, target) for _ in range(repeats))


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)
