"""Launch a command: prepare its environment, supervise it, start it again after a failure if that was asked for."""

from __future__ import annotations

import os
import signal

from ckpt_run import environment, exits, nodes, output_dir, processes, programs, resume
from ckpt_run.arguments import Parsed
from ckpt_run.ledger import Ledger
from ckpt_run.messages import say
from ckpt_run.signals import Signals, die_of
from ckpt_run.supervisor import Supervisor


def launch(parsed: Parsed) -> int:
    """Run ``parsed.rest``; the exit code. With ``--exec``, or below another ckpt-run, this process becomes the command.

    Raises:
        UsageError: a setting has a value that it cannot have.
    """
    signals = Signals()
    try:
        return _launch(parsed, signals)
    except programs.CannotRunError as error:
        say(str(error))
        return error.code


def _launch(parsed: Parsed, signals: Signals) -> int:
    command = parsed.rest
    inherited = environment.inherited()
    path = programs.find(command, inherited)
    if _below_another(inherited):
        return _pass_on(parsed, inherited, path, signals)
    env = environment.build(parsed, inherited, environment.new_run_id())
    ledger = Ledger(env[environment.RUN_ID], command)
    told = output_dir.told(command, env)
    directory = told or ledger.output_dir_of_last_launch()
    resume.announce(env, directory, guessed=told is None)
    signals.block()
    if "exec" in parsed:
        ledger.begin(directory)
        signals.release()
        return programs.become(path, command, env)
    env[environment.LAUNCHER] = str(os.getpid())
    folder = ledger.open_folder()
    if folder is not None:
        env[environment.PROCESSES] = folder
        nodes.own_env_file(command, env, folder)
    try:
        supervisor = Supervisor(signals, folder)
        code = _supervise(parsed, path, env, directory, supervisor, ledger)
    finally:
        ledger.close()
    if supervisor.interrupted and code == 128 + signal.SIGINT:
        die_of(signal.SIGINT)
    return code


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
        resume.announce(env, directory)
    signals.release()
    return programs.become(path, parsed.rest, env)


def _supervise(
    parsed: Parsed,
    path: str,
    env: dict[str, str],
    directory: str | None,
    supervisor: Supervisor,
    ledger: Ledger,
) -> int:
    """Run the command, again after a failure as often as allowed, until nothing of it is left; the exit code."""
    if not supervisor.start(path, parsed.rest, env):
        return supervisor.stop_code()
    ledger.begin(directory)  # the command is under way: this costs it nothing
    code = _wait(parsed.rest, env, supervisor, ledger)
    for restart in range(1, parsed.max_restarts + 1):
        if code == 0 or supervisor.stopped:
            break
        line = f"the command failed with exit code {code}: starting it again {{}} (restart {restart} of {parsed.max_restarts})"
        code = _run_again(parsed, path, env, supervisor, ledger, line)
    supervisor.drain()
    ledger.end(code)
    return code


def _run_again(
    parsed: Parsed, path: str, env: dict[str, str], supervisor: Supervisor, ledger: Ledger, line: str
) -> int:
    """The exit code of the command, or ours when we were told to stop before it could start."""
    if supervisor.clear_the_way():
        _prepare_restart(parsed, env, supervisor, ledger)
        step = env.get(environment.LAST_STEP)
        say(line.format(f"from step {step}" if step else "from the beginning"))
        if supervisor.start(path, parsed.rest, env):
            ledger.restarted()
            return _wait(parsed.rest, env, supervisor, ledger)
    return supervisor.stop_code()


def _wait(command: list[str], env: dict[str, str], supervisor: Supervisor, ledger: Ledger) -> int:
    before = exits.memory_kills()
    status = supervisor.wait()
    after = exits.memory_kills()
    out_of_memory = None if before is None or after is None else after > before
    explanation = exits.explain(command, status, out_of_memory)
    if explanation:
        say(explanation)
    code = supervisor.exit_code(status)
    if code:
        resume.note_failure(ledger.output_dir_of_this_launch(), env[environment.RUN_ID])
    return code


def _prepare_restart(parsed: Parsed, env: dict[str, str], supervisor: Supervisor, ledger: Ledger) -> None:
    """Go on from the newest checkpoint. With --fresh that is one of this launch: its token begins one lineage only.

    To verify it may take minutes, in which there is no command to hand a stop to.
    """

    def last_words(code: int) -> None:
        ledger.end(code)
        ledger.close()

    supervisor.signals.obey(last_words)
    directory = ledger.output_dir_of_this_launch() or output_dir.told(parsed.rest, env)
    resume.announce(env, directory)
    supervisor.signals.block()
