"""Every setting of ckpt-run, in one table.

A setting is read from the script's ``runtime_config`` first, then from its environment variable, then it has its default.
The launcher passes its options on as those variables, so there is one way in. Standard library only.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


class SettingError(ValueError):
    """A setting that is unknown or has a value it cannot have; the message names the setting, the value and the way out."""


@dataclass(frozen=True)
class Setting:
    """One row: ``key`` in runtime_config, ``variable`` in the environment, what a value may be."""

    key: str
    variable: str
    default: Any
    unit: str
    parse: Callable[[Any], Any]
    meaning: str


def _number(value: Any) -> float:
    """NaN, which is above and below nothing, for what is no number."""
    try:
        return float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _positive(value: Any) -> float:
    number = _number(value)
    if not 0 < number < float("inf"):
        raise ValueError("expected a number above 0")
    return number


def _count(value: Any) -> int:
    number = _number(value)
    if not (1 <= number < float("inf") and number.is_integer()):
        raise ValueError("expected a whole number of at least 1")
    return int(number)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
        "": False,
    }
    try:
        return words[str(value).strip().lower()]
    except KeyError:
        raise ValueError("expected 1 or 0, true or false") from None


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return str(value)

    return parse


TABLE: tuple[Setting, ...] = (
    Setting(
        "host_cache_size",
        "CKPT_RUN_HOST_CACHE_SIZE",
        None,
        "GiB per rank",
        _positive,
        "host memory that staged bytes wait in; default: derived from free memory and the ranks on this host",
    ),
    Setting(
        "parser_threads",
        "CKPT_RUN_PARSER_THREADS",
        1,
        "threads",
        _count,
        "native threads that turn saved objects into staged, checksummed blocks",
    ),
    Setting(
        "pin_host_cache",
        "CKPT_RUN_PIN_HOST_CACHE",
        True,
        "switch",
        _switch,
        "page-lock the host cache when there is a GPU",
    ),
    Setting(
        "resume",
        "CKPT_RUN_RESUME",
        "never",
        "auto, never, required",
        _one_of("auto", "never", "required"),
        "what a script that passes no resume_from_checkpoint does; the launcher sets auto",
    ),
    Setting(
        "keep_trainer_saves",
        "CKPT_RUN_KEEP_TRAINER_SAVES",
        False,
        "switch",
        _switch,
        "also give Trainer's own checkpoint-N in output_dir, made from the committed one",
    ),
    Setting(
        "commit_timeout",
        "CKPT_RUN_COMMIT_TIMEOUT",
        1800.0,
        "seconds",
        _positive,
        "how long the committer waits for every rank's vote before it abandons a checkpoint",
    ),
    Setting(
        "exit_timeout",
        "CKPT_RUN_EXIT_TIMEOUT",
        600.0,
        "seconds",
        _positive,
        "how long the end of training or of the process waits for what is in flight",
    ),
    Setting(
        "io",
        "CKPT_RUN_IO",
        "auto",
        "auto, direct, buffered",
        _one_of("auto", "direct", "buffered"),
        "how files are written; auto tries O_DIRECT and falls back",
    ),
    Setting(
        "snapshot",
        "CKPT_RUN_SNAPSHOT",
        "late",
        "late, eager",
        _one_of("late", "eager"),
        "eager copies everything before the save returns: for code that changes weights without an optimizer",
    ),
    Setting(
        "loop_saves",
        "CKPT_RUN_LOOP_SAVES",
        "concurrent",
        "concurrent, wait, off",
        _one_of("concurrent", "wait", "off"),
        "training loops without the Trainer; wait: the call returns when the checkpoint is committed, for scripts that read it at once",
    ),
    Setting(
        "occupied",
        "CKPT_RUN_OCCUPIED",
        "refuse",
        "refuse, take",
        _one_of("refuse", "take"),
        "where another training saves into the output directory; take: when that one is known to be gone, and its lock is not",
    ),
    Setting(
        "cuda_driver",
        "CKPT_RUN_CUDA_DRIVER",
        "libcuda.so.1",
        "library",
        str,
        "the CUDA driver, looked for when the first tensor on a GPU is saved",
    ),
)

DECORATED = ("trainer", "engine", "accelerator")
"""Keys of runtime_config that are no settings: the Trainer, DeepSpeed engine or Accelerator that is to be decorated."""

BY_KEY: Mapping[str, Setting] = {setting.key: setting for setting in TABLE}


@dataclass(frozen=True)
class Settings:
    """Parsed values, one attribute for each row of :data:`TABLE`."""

    host_cache_size: float | None
    parser_threads: int
    pin_host_cache: bool
    resume: str
    keep_trainer_saves: bool
    commit_timeout: float
    exit_timeout: float
    io: Literal["auto", "direct", "buffered"]
    snapshot: str
    loop_saves: str
    occupied: str
    cuda_driver: str


def load(
    runtime_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settle every setting.

    Raises:
        SettingError: an unknown key (the nearest known one is named), or a value that cannot be used.
    """
    given = {key: value for key, value in (runtime_config or {}).items() if key not in DECORATED}
    for key in given:
        if key not in BY_KEY:
            raise SettingError(_unknown(str(key)))
    variables = os.environ if environ is None else environ
    return Settings(**{setting.key: _settle(setting, given, variables) for setting in TABLE})


def _settle(setting: Setting, given: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    if given.get(setting.key) is not None:
        value, source = given[setting.key], f"runtime_config[{setting.key!r}]"
    elif variables.get(setting.variable, "") != "":
        value, source = variables[setting.variable], setting.variable
    else:
        return setting.default
    try:
        return setting.parse(value)
    except ValueError as error:
        unit = "" if setting.unit in str(error) else f"{setting.unit}: "
        raise SettingError(f"{source} is {value!r}: {error} ({unit}{setting.meaning})") from None


def _unknown(key: str) -> str:
    known = [*BY_KEY, *DECORATED]
    return (
        f"runtime_config has no key {key!r}; did you mean {nearest(key, known)!r}?"
        f" Known keys: {', '.join([*DECORATED, *BY_KEY])}"
    )


def nearest(word: str, known: Sequence[str]) -> str:
    """Which of the ``known`` was probably meant: one that begins with ``word``, or else the one that looks most like it."""
    begun = [name for name in known if word and name.startswith(word)]
    return (begun or difflib.get_close_matches(word, known, n=1, cutoff=0.0))[0]
