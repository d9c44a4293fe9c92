"""Launch a command: prepare its environment, supervise it, start it again after a failure if that was asked for."""

from __future__ import annotations

import os

from ckpt_run import environment, exits, output_dir, processes, programs, resume
from ckpt_run.arguments import Parsed
from ckpt_run.ledger import Ledger
from ckpt_run.messages import say
from ckpt_run.signals import Signals, Stopped
from ckpt_run.supervisor import Supervisor


def launch(parsed: Parsed) -> int:
    """Run ``parsed.rest``; the exit code. With ``--exec``, or below another ckpt-run, this process becomes the command.

    Raises:
        UsageError: a setting has a value that it cannot have.
    """
    try:
        signals = Signals()
        try:
            return _launch(parsed, signals)
        except programs.CannotRunError as error:
            say(str(error))
            return error.code
    except Stopped as stop:
        return 128 + stop.number


def _launch(parsed: Parsed, signals: Signals) -> int:
    command = parsed.rest
    inherited = environment.inherited()
    path = programs.find(command, inherited)
    if _below_another(inherited):
        return _pass_on(parsed, inherited, path, signals)
    env = environment.build(parsed, inherited, environment.new_run_id())
    ledger = Ledger(env[environment.RUN_ID], command)
    directory = output_dir.told(command, env) or ledger.output_dir_of_last_launch()
    environment.set_last_step(env, None if "fresh" in parsed else resume.step(directory))
    ledger.begin(directory)
    if "exec" in parsed:
        signals.release()
        return programs.become(path, command, env)
    env[environment.LAUNCHER] = str(os.getpid())
    if ledger.processes is not None:
        env[environment.PROCESSES] = ledger.processes
    return _supervise(parsed, path, env, Supervisor(signals, ledger.processes), ledger)


def _below_another(env: dict[str, str]) -> bool:
    """Whether another ckpt-run supervises us: then it has the signals and the restarts, and a second one would double them."""
    launcher = env.get(environment.LAUNCHER, "")
    return launcher.isdecimal() and environment.RUN_ID in env and processes.is_ancestor(int(launcher))


def _pass_on(parsed: Parsed, inherited: dict[str, str], path: str, signals: Signals) -> int:
    if parsed.max_restarts:
        say("--max-restarts counts for the outer ckpt-run only")
    env = environment.build(parsed, inherited)
    directory = output_dir.told(parsed.rest, env)
    if directory is not None:
        environment.set_last_step(env, None if "fresh" in parsed else resume.step(directory))
    signals.release()
    return programs.become(path, parsed.rest, env)


def _supervise(parsed: Parsed, path: str, env: dict[str, str], supervisor: Supervisor, ledger: Ledger) -> int:
    restarts = 0
    while True:
        memory_kills = exits.memory_kills()
        status = supervisor.run(path, parsed.rest, env)
        explanation = exits.explain(parsed.rest, status, exits.memory_kills() > memory_kills)
        if explanation:
            say(explanation)
        code = supervisor.exit_code(status)
        if code == 0 or supervisor.stopped or restarts == parsed.max_restarts:
            break
        restarts += 1
        supervisor.clear_the_way()
        if supervisor.stopped:
            break
        _prepare_restart(parsed, env, ledger)
        say(_restart_line(code, restarts, parsed.max_restarts, env))
    supervisor.drain()
    ledger.end(code)
    return code


def _prepare_restart(parsed: Parsed, env: dict[str, str], ledger: Ledger) -> None:
    """What began fresh goes on now, from the newest checkpoint."""
    env.pop(environment.FRESH, None)
    directory = ledger.output_dir_of_this_launch() or output_dir.told(parsed.rest, env)
    environment.set_last_step(env, resume.step(directory))


def _restart_line(code: int, restart: int, restarts: int, env: dict[str, str]) -> str:
    step = env.get(environment.LAST_STEP)
    place = f"from step {step}" if step else "from the beginning"
    return f"the command failed with exit code {code}: starting it again {place} (restart {restart} of {restarts})"
