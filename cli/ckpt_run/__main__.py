"""``python -m ckpt_run`` is ``ckpt-run``."""

from __future__ import annotations

import sys

from ckpt_run.main import main

if __name__ == "__main__":
    sys.exit(main())
