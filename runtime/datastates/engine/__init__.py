"""What turns file images into durable files while training goes on: the Python face of the native engine in csrc/.

    engine = Engine(cache_bytes=4 << 30)
    ticket = engine.submit([PendingFile(image, "/ckpt/model.tmp", "/ckpt/model.safetensors")])
    ...                       # training goes on; memory promised to be still must not change yet
    ticket.wait_staged()      # the fence: now it may
    ticket.approve()          # the files may get their names
    ticket.wait()
    if ticket.error: ...

Importing this raises ImportError, with the reason, where the native module is missing or was built for another Python.
"""

from __future__ import annotations

import sys

try:
    from datastates.engine._native import crc32, crc32_combine
except ImportError as error:
    raise ImportError(
        f"the native engine of ckpt-run cannot be loaded by Python {sys.version_info.major}.{sys.version_info.minor} "
        f"({sys.executable}): {error}. It works only with the Python version it was installed for; "
        "install ckpt-run into this environment to save checkpoints here."
    ) from error

from datastates.engine.engine import Engine, EngineError, Ticket
from datastates.engine.image import CPU, Checksum, Digest, FileImage, FileResult, Literal, Memory, PendingFile
from datastates.engine.memory import memory_available, memory_limit

__all__ = [
    "CPU",
    "Checksum",
    "Digest",
    "Engine",
    "EngineError",
    "FileImage",
    "FileResult",
    "Literal",
    "Memory",
    "PendingFile",
    "Ticket",
    "crc32",
    "crc32_combine",
    "memory_available",
    "memory_limit",
]
