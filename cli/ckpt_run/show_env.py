"""``ckpt-run env``: what a command would get, for a shell or as JSON."""

from __future__ import annotations

import json
import shlex
import sys

from ckpt_run import environment, output_dir, resume
from ckpt_run.arguments import Option, Parsed, UsageError, parse

SCHEMA_VERSION = 1

JSON = Option("--json", None, "one JSON object instead of shell lines")

HELP = """\
Usage: ckpt-run [OPTIONS] env [--json] [OPTIONS] [COMMAND ...]

Prints the environment that a command would get under ckpt-run, as shell lines
or as one JSON object. OPTIONS are those of ckpt-run itself; the command is not
run, it only tells where the training saves.

Examples:
  eval "$(ckpt-run env)"; python train.py
  ckpt-run env --json --online python train.py --output_dir out
"""


def main(words: list[str], parsed: Parsed) -> int:
    """Print it; the exit code.

    Raises:
        UsageError: an option that does not exist, or a setting that cannot be.
    """
    own = parse(words, (JSON,))
    if "help" in own:
        sys.stdout.write(HELP)
        return 0
    if own.rest and "=" in own.rest[0]:
        raise UsageError(
            "this prints an environment and runs nothing; for the program env: ckpt-run -- env ..."
        )
    own.values = {**parsed.values, **own.values}
    before = environment.inherited()
    after = environment.build(own, before, environment.new_run_id())
    directory = output_dir.told(own.rest or [""], after)
    resume.announce(after, directory)
    changed, removed = environment.changes(before, after)
    sys.stdout.write(_json(changed, removed, directory) if "json" in own else _shell(changed, removed))
    return 0


def _shell(changed: dict[str, str], removed: list[str]) -> str:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in changed.items()]
    return "".join(f"{line}\n" for line in [*lines, *(f"unset {name}" for name in removed)])


def _json(changed: dict[str, str], removed: list[str], directory: str | None) -> str:
    found = {"schema_version": SCHEMA_VERSION, "set": changed, "unset": removed, "output_dir": directory}
    return json.dumps(found, indent=1) + "\n"
