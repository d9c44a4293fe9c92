"""Split the command line: our options, then everything that is the user's, byte for byte.

By hand, because launching must cost little and because the usual parsers take ``-v``, ``--help`` or ``--`` out of what
belongs to the wrapped command. Our options end at the first word that is not one of them.
"""

from __future__ import annotations


class UsageError(Exception):
    """The command line cannot be what was meant; the message says why. Exit code 2."""


class Option:
    """One row of :data:`OPTIONS`. ``value`` is what to call its value in the help; None: it is a switch."""

    def __init__(self, name: str, value: str | None, help: str, variable: str | None = None) -> None:
        self.name = name
        self.value = value
        self.help = help
        self.variable = variable

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


OPTIONS = (
    Option(
        "--output-dir",
        "DIR",
        "where the training saves, if its command line does not say so",
        "CKPT_RUN_OUTPUT_DIR",
    ),
    Option(
        "--resume",
        "WHEN",
        "auto: carry on when the last run did not finish; never; required",
        "CKPT_RUN_RESUME",
    ),
    Option("--fresh", None, "start over as a new lineage of checkpoints; deletes nothing"),
    Option("--online", None, "leave the hub's offline variables alone, so that downloads work"),
    Option("--exec", None, "become the command instead of supervising it"),
    Option("--max-restarts", "N", "start again after a failure, at most N times"),
    Option(
        "--keep-trainer-saves", None, "give Trainer's own checkpoint-N as well", "CKPT_RUN_KEEP_TRAINER_SAVES"
    ),
    Option(
        "--host-cache-size", "GIB", "memory per rank that checkpoints wait in", "CKPT_RUN_HOST_CACHE_SIZE"
    ),
    Option("--help", None, "show this and exit"),
    Option("--version", None, "show the version and exit"),
)

SHORT = {"-h": "--help", "-V": "--version"}

SUBCOMMANDS = {
    "status": "what the newest run is doing: step, checkpoints, stalls, ranks",
    "verify": "check every file of a checkpoint, or of all, against its checksums",
    "convert": "copy a DeepSpeed checkpoint so that any number of ranks can load it",
    "env": "print the environment that a command would get",
    "demo": "train, get killed, resume, compare: a demonstration in about a minute",
}

HELP = """\
Usage: ckpt-run [OPTIONS] COMMAND [ARGUMENTS...]
       ckpt-run status|verify|convert|env|demo --help

Runs a Hugging Face training command so that its checkpoints are saved while it
keeps training, and so that it carries on from the newest good one after it was
killed. The command stays as it is; options of ckpt-run come before it.

Examples:
  ckpt-run python train.py --output_dir out
  ckpt-run torchrun --nproc-per-node 4 train.py
  ckpt-run deepspeed --num_gpus=4 train.py
  ckpt-run accelerate launch --config_file fsdp.yaml train.py
  ckpt-run status

Options:
{options}

Commands:
{commands}
  -- COMMAND            run a program that has one of these names

Exit code: the command's own, 128 + N when signal N ended it, 127 not found,
126 not executable, 125 ckpt-run itself failed, 2 wrong usage.
"""


class Parsed:
    """``values``: our options by key, switches True. ``rest``: the untouched words after them."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.rest: list[str] = []
        self.after_dashes = False

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    @property
    def max_restarts(self) -> int:
        return int(self.values.get("max_restarts", "0"))


def parse(words: list[str], extra: tuple[Option, ...] = ()) -> Parsed:
    """Read our options, and ``extra`` ones, off the front of ``words``.

    Raises:
        UsageError: an unknown option (the nearest one is named), a value that is missing or impossible.
    """
    parsed = Parsed()
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word = words[position]
        position += 1
        if word == "--":
            parsed.after_dashes = True
            break
        name, equals, value = word.partition("=")
        option = _find(SHORT.get(name, name), word, (*OPTIONS, *extra))
        if option.value is None and equals:
            raise UsageError(f"{option.name} takes no value")
        if option.value is not None and not equals:
            if position == len(words):
                raise UsageError(f"{option.name} needs a value: {option.name} {option.value}")
            value = words[position]
            position += 1
        parsed.values[option.key] = _checked(option, value) if option.value is not None else "1"
    parsed.rest = words[position:]
    return parsed


def _find(name: str, word: str, options: tuple[Option, ...]) -> Option:
    for option in options:
        if option.name == name:
            return option
    import difflib

    nearest = difflib.get_close_matches(name, [option.name for option in options], n=1, cutoff=0.0)[0]
    raise UsageError(
        f"no option {word}; did you mean {nearest}? (Options of the command itself come after the command.)"
    )


def _checked(option: Option, value: str) -> str:
    if not value:
        raise UsageError(f"{option.name} is empty")
    if option.name == "--max-restarts" and not (value.isascii() and value.isdigit()):
        raise UsageError(f"--max-restarts {value}: expected 0 or more")
    if option.name == "--resume" and value not in ("auto", "never", "required"):
        raise UsageError(f"--resume {value}: expected auto, never or required")
    return value


def help_text() -> str:
    options = [(f"{option.name} {option.value or ''}".rstrip(), option.help) for option in OPTIONS]
    return HELP.format(options=_columns(options), commands=_columns(list(SUBCOMMANDS.items())))


def _columns(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {left:<22}{right}" for left, right in rows)
