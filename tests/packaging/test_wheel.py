"""The wheel holds everything: unpacked alone, away from the sources, it launches, hooks, loads its engine and has its templates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2]
NEEDED = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "cli", "csrc", "runtime", "templates")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel puts into site-packages. Built from a copy, which leaves the installation in use alone."""
    copy = tmp_path_factory.mktemp("sources")
    for name in NEEDED:
        source = SOURCES / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, copy)
    wheels = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
        str(copy),
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the build tools of this environment, not the system's
    result = subprocess.run(
        pip, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = wheels.glob("*.whl")
    unpacked = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


def run(unpacked: Path, code: str) -> str:
    """Run `code` with the unpacked wheel; -S leaves this environment's own installation of the project out."""
    environ = {
        **os.environ,
        "PYTHONPATH": f"{unpacked}:{sysconfig.get_path('purelib')}:{sysconfig.get_path('platlib')}",
    }
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command, env=environ, cwd=unpacked, capture_output=True, text=True, check=True
    ).stdout


def test_the_engine_is_in_the_wheel_and_loads(unpacked: Path) -> None:
    where = run(
        unpacked,
        "from datastates.engine import crc32; import datastates; print(crc32(b'123456789'), datastates.__file__)",
    )
    assert where.split() == [str(0xCBF43926), str(unpacked / "datastates" / "__init__.py")]


def test_the_launcher_is_in_the_wheel_and_names_its_own_hook(unpacked: Path) -> None:
    output = run(unpacked, "from ckpt_run.main import main; main(['env'])")
    assert f"export CHECKPOINT_VENDOR={unpacked / 'datastates' / '_hook'}\n" in output
    assert (unpacked / "datastates" / "_hook" / "sitecustomize.py").is_file()


def test_the_templates_are_in_the_wheel(unpacked: Path) -> None:
    where = Path(run(unpacked, "from ckpt_run.demo import templates; print(templates())").strip())
    assert where == unpacked / "ckpt_run" / "templates"
    shipped = {path.name for path in (SOURCES / "templates").iterdir() if path.is_file()}
    assert {path.name for path in where.iterdir()} == shipped


def test_nothing_but_the_two_packages_and_their_metadata_is_installed(unpacked: Path) -> None:
    tops = {path.name.split("-")[0] for path in unpacked.iterdir()}
    assert tops == {"ckpt_run", "datastates"}
    assert not [path for path in unpacked.rglob("*") if path.suffix in (".cc", ".h")]
