"""Checkpoints that are saved while training goes on; see :mod:`datastates.llm`."""

__version__ = "0.1.0"
