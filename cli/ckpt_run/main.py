"""The entry point. Launching imports next to nothing; the commands that print tables bring their own libraries."""

from __future__ import annotations

import sys

from ckpt_run.arguments import SUBCOMMANDS, Parsed, UsageError, help_text, parse
from ckpt_run.exits import OWN_FAILURE
from ckpt_run.messages import say

WRONG_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run ``ckpt-run`` with ``argv`` (default: the process's arguments); the exit code."""
    if not sys.platform.startswith("linux"):
        say(f"runs on Linux only (this is {sys.platform})")
        return OWN_FAILURE
    try:
        return _run(parse(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        say(f"{error} (ckpt-run --help lists everything)")
        return WRONG_USAGE


def _run(parsed: Parsed) -> int:
    if "help" in parsed:
        sys.stdout.write(help_text())
        return 0
    if "version" in parsed:
        from datastates import __version__

        sys.stdout.write(f"ckpt-run {__version__}\n")
        return 0
    if not parsed.rest:
        sys.stderr.write(help_text())
        return WRONG_USAGE
    if parsed.rest[0] in SUBCOMMANDS and not parsed.after_dashes:
        return _subcommand(parsed.rest[0], parsed.rest[1:], parsed)
    return _launch(parsed)


def _subcommand(name: str, words: list[str], parsed: Parsed) -> int:
    if name == "env":
        from ckpt_run.show_env import main as show_env

        return show_env(words, parsed)
    if parsed.values:
        option = next(iter(parsed.values)).replace("_", "-")
        raise UsageError(
            f"--{option} is an option for running a command; for a program named {name}: ckpt-run -- {name}"
        )
    if name == "demo":
        from ckpt_run.demo import main as demo

        return demo(words)
    from ckpt_run.console import main as console

    return console([name, *words])


def _launch(parsed: Parsed) -> int:
    from ckpt_run.launch import launch

    try:
        return launch(parsed)
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - the one place where an error of ours becomes an exit code that is not the command's
        import traceback

        traceback.print_exc()
        say("this is a failure of ckpt-run itself")
        return OWN_FAILURE
