"""The environment that a command gets under ckpt-run.

What the user exported wins over our defaults; an option wins over both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ckpt_run.arguments import OPTIONS, Parsed, UsageError
from ckpt_run.messages import say

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
CARRIER = "PYTHON_CKPT_RUN"
LAST_STEP = "CKPT_LAST_STEP"

RUN_ID = "CKPT_RUN_RUN_ID"
FRESH = "CKPT_RUN_FRESH"
RESUME = "CKPT_RUN_RESUME"
OFFLINE_SET = "CKPT_RUN_OFFLINE"  # which of OFFLINE are ours, for the hook to name
LAUNCHER = "CKPT_RUN_LAUNCHER"  # our process id, for a ckpt-run that is started below us
PROCESSES = "CKPT_RUN_PROCESSES"  # the folder in which the hook registers processes that train
OF_THIS_HOST = (LAUNCHER, PROCESSES)
OUTPUT_DIR = "CKPT_RUN_OUTPUT_DIR"
VENDOR = "CHECKPOINT_VENDOR"
FOR_USERS = (OUTPUT_DIR, "CKPT_RUN_DEBUG", "CKPT_RUN_DISABLE")
NO_SETTINGS = (*FOR_USERS, RUN_ID, FRESH, OFFLINE_SET, *OF_THIS_HOST)


def hook_folder() -> str:
    import datastates

    return os.path.join(os.path.dirname(os.path.abspath(datastates.__file__)), "_hook")


def inherited() -> dict[str, str]:
    """What we were started with. In a C locale Python adds LC_CTYPE for itself; the command is not to see that."""
    env = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            initial = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
    except OSError:
        return env
    if b"LC_CTYPE" not in initial:
        env.pop("LC_CTYPE", None)
    return env


def build(parsed: Parsed, inherited: Mapping[str, str], run_id: str | None = None) -> dict[str, str]:
    """Everything but what depends on the output directory (:func:`set_last_step`) and on this process.

    ``run_id`` None: below another ckpt-run, whose run this is a part of.

    Raises:
        UsageError: a setting has a value that it cannot have.
    """
    env = dict(inherited)
    _take_back_offline(env)
    if run_id is not None:
        _forget_older_launch(env)
        env[RUN_ID] = run_id
    hook = hook_folder()
    env["PYTHONPATH"] = with_hook_first(hook, env.get("PYTHONPATH", ""))
    env[VENDOR] = hook
    if "online" not in parsed:
        _go_offline(env)
    for option in OPTIONS:
        value = parsed.get(option.key)
        if option.variable and value is not None:
            env[option.variable] = value
    env.setdefault(RESUME, "auto")
    if "fresh" in parsed:
        env[FRESH] = env[RUN_ID]
    _check_settings(env, parsed)
    if run_id is not None:  # else the ckpt-run above has told
        _name_unknown(env)
    return env


def set_last_step(env: dict[str, str], step: int | None) -> None:
    """Tell the script which step there is to resume from, or that there is none; and pack all for other hosts."""
    if step is None:
        env.pop(LAST_STEP, None)
    else:
        env[LAST_STEP] = str(step)
    env[CARRIER] = carrier(env)


def carrier(env: Mapping[str, str]) -> str:
    """Our variables as one word, for launchers that hand on only variables named PYTHON* to other hosts."""
    import base64
    import json

    ours = {name: env[name] for name in env if _travels(name)}
    return base64.urlsafe_b64encode(json.dumps(ours, sort_keys=True).encode()).decode()


def _travels(name: str) -> bool:
    return name in (VENDOR, *OFFLINE) or (
        name.startswith(("CKPT_RUN_", LAST_STEP)) and name not in OF_THIS_HOST
    )


def with_hook_first(hook: str, pythonpath: str) -> str:
    """PYTHONPATH with the hook's folder in front once; the user's entries stay as they are, empty ones included.

    A joined empty string would not do: an empty entry is the working directory.
    """
    entries = pythonpath.split(os.pathsep) if pythonpath else []
    return os.pathsep.join([hook, *(entry for entry in entries if entry.rstrip("/") != hook)])


def new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What to set and what to unset to get from one environment to the other."""
    changed = {name: value for name, value in sorted(after.items()) if before.get(name) != value}
    return changed, sorted(before.keys() - after.keys())


def _go_offline(env: dict[str, str]) -> None:
    ours = [name for name in OFFLINE if name not in env]
    for name in ours:
        env[name] = "1"
    if ours:
        env[OFFLINE_SET] = ",".join(ours)


def _take_back_offline(env: dict[str, str]) -> None:
    """What a ckpt-run above us set is not what the user set."""
    for name in env.pop(OFFLINE_SET, "").split(","):
        env.pop(name, None)


def _forget_older_launch(env: dict[str, str]) -> None:
    """A shell that was started by a ckpt-run of long ago still has that one's identity."""
    if env.get(FRESH) == env.get(RUN_ID):
        env.pop(FRESH, None)
    for name in (CARRIER, *OF_THIS_HOST):
        env.pop(name, None)


def _check_settings(env: Mapping[str, str], parsed: Parsed) -> None:
    """Refuse a value that the training could only complain about when it is under way."""
    if env[RESUME] == "auto" and _given(env) <= {RESUME, *NO_SETTINGS}:
        return
    from datastates import settings

    try:
        settings.load(environ=env)
    except settings.SettingError as error:
        message = str(error)
        for option in OPTIONS:
            if option.variable and option.key in parsed:
                message = message.replace(option.variable, option.name)
        raise UsageError(message) from None


def _name_unknown(env: Mapping[str, str]) -> None:
    """A variable that is misspelt has no effect, and nobody would notice."""
    others = _given(env) - {RESUME, *NO_SETTINGS}
    if not others:
        return
    from datastates import settings

    known = [setting.variable for setting in settings.TABLE]
    for name in sorted(others.difference(known)):
        meant = settings.nearest(name.upper(), [*known, *FOR_USERS])
        say(f"{name} is not a variable of ckpt-run, and has no effect; did you mean {meant}?")


def _given(env: Mapping[str, str]) -> set[str]:
    return {name for name in env if name.startswith("CKPT_RUN_") and env[name]}
