"""What turns file images into durable files while training goes on: the Python face of the native engine in csrc/."""

from __future__ import annotations

from datastates.engine._native import crc32, crc32_combine
from datastates.engine.image import CPU, Checksum, Digest, FileImage, FileResult, Literal, Memory, PendingFile

__all__ = ["CPU", "Checksum", "Digest", "FileImage", "FileResult", "Literal", "Memory", "PendingFile", "crc32", "crc32_combine"]
