"""From an object to the exact bytes of its file, without copying tensors and without writing anything.

``torch_zip`` and ``safetensors_file`` make the :class:`~datastates.engine.image.FileImage` of what ``torch.save`` and
``safetensors.torch.save_file`` would have written; ``intercept`` hands over the object when a program calls those functions;
``render`` turns an image into bytes again, for tests and for the self check.
"""

from __future__ import annotations

from datastates.formats.builder import Describe
from datastates.formats.device import CannotImage

__all__ = ["CannotImage", "Describe"]
