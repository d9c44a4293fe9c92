"""Runs one function of a case in this process and prints what it returns: ``python -m benchmarks.worker MODULE FUNCTION JSON``."""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> None:
    """The answer, or in words what went wrong, goes to the real stdout; whatever else is printed goes to stderr."""
    module, function, arguments = sys.argv[1:]
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except Exception as error:
        os.write(answer, json.dumps(f"{type(error).__name__}: {error}").encode())
        raise
    os.write(answer, json.dumps(result).encode())
    os._exit(0)  # some contestants have threads that never end


if __name__ == "__main__":
    main()
