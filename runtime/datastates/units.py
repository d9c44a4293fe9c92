"""How bytes are told to a person, the same wherever they are told."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """``1500000`` as ``1.43 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
