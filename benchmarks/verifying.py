"""How fast the checksums of a large checkpoint are found to be right."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datastates.store.layout import Root
from datastates.store.verify import usable_cores

from benchmarks import states
from benchmarks.contestants import CkptRun

NBYTES = 4 * 10**9
RANGE = 8 << 20


def visit(contestant: str, folder: str, nbytes: int = NBYTES) -> dict[str, float]:
    """Seconds with the files in the page cache, and with none of them there."""
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        saver = CkptRun(Path(output_dir), states.alike(nbytes), 1 << 30)
        saver.save(1)
        saver.wait()
        checkpoint = Root.of(output_dir).checkpoint(1).path
        saver.state.clear()
        read = _verify if contestant == "ckpt-run verify" else _read
        forget(checkpoint)
        cold = _seconds(read, checkpoint)
        _read(checkpoint)
        figures = {"cached": _seconds(read, checkpoint), "from disk": cold}
        saver.close()
    return figures


def _seconds(read: Callable[[Path], None], checkpoint: Path) -> float:
    began = time.perf_counter()
    read(checkpoint)
    return time.perf_counter() - began


def _verify(checkpoint: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "ckpt_run", "verify", str(checkpoint)], check=True, stdout=sys.stderr
    )


def _read(checkpoint: Path) -> None:
    """Every byte, with all cores, and nothing done to it."""
    for path in _files(checkpoint):
        file = os.open(path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(usable_cores()) as pool:
                for _ in pool.map(
                    lambda start, f=file: _read_range(f, start), range(0, path.stat().st_size, RANGE)
                ):
                    pass
        finally:
            os.close(file)


def _read_range(file: int, start: int) -> None:
    buffer = bytearray(RANGE)
    os.preadv(file, [buffer], start)


def forget(checkpoint: Path) -> None:
    """Take its files out of the page cache."""
    os.sync()
    for path in _files(checkpoint):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _files(checkpoint: Path) -> Iterator[Path]:
    return (path for path in checkpoint.iterdir() if path.is_file())
