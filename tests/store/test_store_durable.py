from __future__ import annotations

import os
import resource
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from datastates.store.durable import fsync_ancestors, make_directories, write_durably

NOBODY = 65534


def in_child(work) -> int:  # type: ignore[no-untyped-def]
    """Run ``work`` in a forked process; its return value is the exit status."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_new_bytes_replace_the_old_ones_and_leave_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"one")
    write_durably(path, b"two" * 100_000)
    assert path.read_bytes() == b"two" * 100_000
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0, 0o666)])
def test_modes_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_durably(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_write_that_fails_leaves_the_old_bytes_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")

    def fill_up() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_durably(path, bytes(5000))
        except OSError:
            return 7
        return 0

    assert in_child(fill_up) == 7
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_bytes_are_durable_before_their_name_and_the_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        calls.append("fsync " + ("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"))
        fsync(descriptor)

    def spy_replace(source: Path, target: Path) -> None:
        calls.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_durably(tmp_path / "file", b"x")
    assert calls == ["fsync file", "rename to file", "fsync directory"]


def test_directories_are_made_by_many_at_once(tmp_path: Path) -> None:
    target = tmp_path / "a/b/c"
    pids = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                make_directories(target)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 8
    assert target.is_dir()


def test_a_directory_above_that_we_may_not_read_is_left_to_its_owner() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        (path / "closed/out").mkdir(parents=True)

        def somebody_else() -> int:
            if os.geteuid() == 0:  # root may open every directory
                os.setuid(NOBODY)
            with pytest.raises(PermissionError):
                os.listdir(path / "closed")
            fsync_ancestors(path / "closed/out")
            return 7

        path.chmod(0o755)
        (path / "closed").chmod(0o311)
        try:
            assert in_child(somebody_else) == 7
        finally:
            (path / "closed").chmod(0o755)


def test_a_file_in_the_place_of_a_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match="a"):
        make_directories(tmp_path / "a/b")
