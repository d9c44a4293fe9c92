"""In PYTHONPATH, behind the hook: the ranks of a launcher become CPU ranks (see ``cpu_ranks.py``), the launcher itself stays as it is."""

import sys
from pathlib import Path

program = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
if program.endswith(("_train.py", "_resume.py")):
    sys.path.append(str(Path(__file__).parents[2]))
    import cpu_ranks

    cpu_ranks.install()
