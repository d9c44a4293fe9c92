"""What every test starts from: one thread, no network, and nothing of a surrounding run or of the user's home."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Before anything imports torch, and inherited by every process that a test starts.
for variable in [name for name in os.environ if name.startswith(("CKPT_", "CHECKPOINT_VENDOR"))]:
    del os.environ[variable]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# DeepSpeed builds a kernel when it first sets up CPU ranks, and takes that of another version for its own.
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "torch_extensions")
for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[variable] = "1"


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The launcher's own record goes to a folder of this test session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
