"""The engine in a process: forks, signals, threads, the GIL, and the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from datastates.engine import Engine, EngineError, _native
from engine_support import (
    BLOCK,
    PATIENCE,
    finish,
    memory_image,
    names,
    native_threads,
    pending,
    random_bytes,
    run,
    save,
)
from stand_in import StandIn
from waiting import until

SIZE = 20 * BLOCK


def in_child(act: Callable[[], None]) -> int:
    """The exit code of a forked child that acts."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_in_a_forked_child_every_call_raises_and_in_the_parent_all_goes_on(
    cuda: StandIn, engine: Engine, tmp_path: Path
) -> None:
    builder = memory_image(random_bytes(SIZE))
    with cuda.held_up(engine, tmp_path):
        ticket = engine.submit([pending(builder, tmp_path / "file")])

        def act() -> None:
            calls: list[Callable[[], object]] = [
                lambda: engine.submit([]),
                lambda: engine.close(0),
                lambda: ticket.state,
                lambda: ticket.error,
                lambda: ticket.torn,
                lambda: ticket.files,
                lambda: ticket.stats,
                lambda: ticket.wait(0),
                lambda: ticket.wait_staged(0),
                ticket.approve,
                lambda: ticket.cancel("x"),
            ]
            for call in calls:
                with pytest.raises(EngineError, match="in a forked child it cannot be used"):
                    call()

        assert in_child(act) == 0
    assert finish(ticket).state == "persisted"
    assert (tmp_path / "file").read_bytes() == builder.expected


FORK = """
engine = Engine(4 * BLOCK, block_bytes=BLOCK)
ticket = engine.submit([pending(memory_image(bytes(20 * BLOCK)), Path(sys.argv[1]) / "file")])
child = os.fork()
if child == 0:
    del engine, ticket
    sys.exit(7)  # an ordinary end of the interpreter
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert finish(ticket).state == "persisted"
"""


def test_a_forked_child_ends_in_its_own_time_and_touches_nothing(tmp_path: Path) -> None:
    result = run(FORK, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert names(tmp_path) == ["file"]


def test_a_forked_child_does_not_hold_the_cache(engine: Engine, tmp_path: Path) -> None:
    save(engine, (memory_image(random_bytes(SIZE)), tmp_path / "file"))
    assert "ckpt-run-" in Path("/proc/self/maps").read_text()

    def act() -> None:
        assert "ckpt-run-" not in Path("/proc/self/maps").read_text()

    assert in_child(act) == 0


UNCLOSED = """
engine = Engine(4 * BLOCK, block_bytes=BLOCK)
ticket = engine.submit([pending(memory_image(bytes(200 * BLOCK)), Path(sys.argv[1]) / "file")])
ticket.approve()
print("done")
"""


def test_a_process_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    result = run(UNCLOSED, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_close_waits_for_what_is_approved(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine(2)
    builder = memory_image(random_bytes(10 * SIZE))
    ticket = engine.submit([pending(builder, tmp_path / "file")])
    ticket.approve()
    assert engine.close(PATIENCE)
    assert ticket.state == "persisted"
    assert (tmp_path / "file").read_bytes() == builder.expected


def test_close_gives_up_at_its_timeout_and_says_so(cuda: StandIn, engine: Engine, tmp_path: Path) -> None:
    with cuda.held_up(engine, tmp_path):
        ticket = engine.submit([pending(memory_image(random_bytes(SIZE)), tmp_path / "file")])
        ticket.approve()
        closing = threading.Thread(target=engine.close, args=(0.05,))
        closing.start()
        assert ticket.wait(PATIENCE)
    closing.join(PATIENCE)
    assert str(ticket.error) == "close: the engine was closed before the save was on disk"
    assert names(tmp_path) == []
    with pytest.raises(EngineError, match="submit: the engine is closed"):
        engine.submit([])
    assert not engine.close(0)


def test_closing_twice_is_once(engine: Engine) -> None:
    assert engine.close(0)
    assert engine.close(0)


def test_a_device_that_hangs_does_not_hang_close(
    cuda: StandIn, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine()
    stream = cuda.stream()
    cuda.hold(stream)
    ticket = engine.submit(
        [pending(memory_image(random_bytes(SIZE), device=0, stream=stream), tmp_path / "file")]
    )
    assert not engine.close(0)
    assert ticket.state == "failed"
    cuda.release(stream)


def test_python_runs_while_the_engine_waits(cuda: StandIn, engine: Engine, tmp_path: Path) -> None:
    with cuda.held_up(engine, tmp_path):
        ticket = engine.submit([pending(memory_image(random_bytes(SIZE)), tmp_path / "file")])
        waiting = threading.Thread(target=ticket.wait_staged, args=(PATIENCE,))
        waiting.start()
        # Were the GIL held, this thread would not get here before the wait has ended.
        assert waiting.is_alive()
        assert sum(range(100_000)) == 4_999_950_000
        assert waiting.is_alive()
    waiting.join(PATIENCE)
    assert ticket.state in ("staging", "staged")
    finish(ticket)


INTERRUPT = """
import signal, threading
from stand_in import StandIn
cuda = StandIn(Path(sys.argv[1]))
engine = Engine(2 * BLOCK, block_bytes=BLOCK, cuda_driver=str(cuda.path))
stream = cuda.stream()
cuda.hold(stream)
plug = engine.submit([pending(memory_image(bytes(2 * BLOCK), device=0, stream=stream), Path(sys.argv[1]) / "plug")])
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    if sys.argv[2] == "submit":
        engine.submit([pending(memory_image(bytes(60 * BLOCK), still=False), Path(sys.argv[1]) / "file")])
    elif sys.argv[2] == "close":
        engine.close()
    else:
        getattr(plug, sys.argv[2])()
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
cuda.release(stream)
engine.close(0)
print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
"""


@pytest.mark.parametrize("call", ["wait", "wait_staged", "submit", "close"])
def test_ctrl_c_reaches_a_waiting_call(tmp_path: Path, call: str) -> None:
    result = run(INTERRUPT, tmp_path, call)
    assert (result.stdout, result.stderr) == ("interrupted\n['libcuda.so.1']\n", "")


def test_native_threads_are_named_low_in_priority_and_take_no_signals(
    make_engine: Callable[..., Engine],
) -> None:
    others = set(native_threads())  # of engines that other tests of this process have made
    make_engine(threads=2)
    until(lambda: len(set(native_threads()) - others) == 3)
    for thread in set(native_threads()) - others:
        assert os.getpriority(os.PRIO_PROCESS, int(thread.name)) == 19
        status = dict(
            line.split(":", 1) for line in (thread / "status").read_text().splitlines() if ":" in line
        )
        blocked = int(status["SigBlk"], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGXFSZ):
            assert blocked >> (number - 1) & 1


MISSING = """
import sys
sys.modules["datastates.engine._native"] = None
try:
    from datastates.engine import Engine
except ImportError as error:
    print(error)
"""


def test_without_the_native_module_the_import_error_says_what_to_do() -> None:
    result = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    assert f"cannot be loaded by Python {sys.version_info.major}.{sys.version_info.minor}" in result.stdout
    assert "install ckpt-run into this environment" in result.stdout


def test_importing_the_engine_imports_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, datastates.engine; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_the_native_module_links_to_neither_torch_nor_cuda() -> None:
    linked = subprocess.run(["ldd", _native.__file__], capture_output=True, text=True, check=True).stdout
    for library in ("torch", "cuda", "uring"):
        assert library not in linked
