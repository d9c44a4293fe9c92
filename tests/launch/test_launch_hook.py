"""The hook leaves no trace in a Python that trains nothing, and chains what it hides."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import HOOK, Sandbox

SOURCE = Path(HOOK, "sitecustomize.py")
REPORT = "import sys; print(sys.modules.get('sitecustomize') and sys.modules['sitecustomize'].__file__)"
USERS = {"sitecustomize.py": "import sys; sys.users_ran = getattr(sys, 'users_ran', 0) + 1\n"}
OTHER_PYTHONS = sorted(Path.home().glob(".pyenv/versions/*/bin/python"))


def python(
    sandbox: Sandbox, code: str, *flags: str, path: str = HOOK, **variables: str
) -> subprocess.CompletedProcess[str]:
    return sandbox.plain(sys.executable, *flags, "-c", code, env={"PYTHONPATH": path, **variables})


def test_its_source_is_one_that_old_interpreters_parse() -> None:
    ast.parse(SOURCE.read_text(), feature_version=(3, 6))


def test_it_is_alone_in_its_folder() -> None:
    assert [path.name for path in Path(HOOK).iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]


@pytest.mark.parametrize("interpreter", OTHER_PYTHONS, ids=lambda path: path.parts[-3])
def test_it_is_silent_in_every_interpreter_there_is(sandbox: Sandbox, interpreter: Path) -> None:
    env = {
        "PYTHONPATH": HOOK,
        "PYTHONDONTWRITEBYTECODE": "1",
        "CKPT_RUN_RUN_ID": "r",
        "CKPT_RUN_OFFLINE": "HF_HUB_OFFLINE",
    }
    done = sandbox.plain(str(interpreter), "-W", "error", "-c", "print(1)", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_nothing_is_imported_that_python_had_not_imported_itself(sandbox: Sandbox) -> None:
    code = "import sys; print(sorted(sys.modules))"
    plain = sandbox.plain(sys.executable, "-W", "error", "-c", code)
    hooked = python(sandbox, code, "-W", "error")
    assert set(ast.literal_eval(hooked.stdout)) - set(ast.literal_eval(plain.stdout)) == {"sitecustomize"}
    assert hooked.stderr == ""


def test_debug_tells_on_stderr_where_it_is_loaded(sandbox: Sandbox) -> None:
    done = python(sandbox, "print(1)", CKPT_RUN_DEBUG="1")
    assert done.stdout == "1\n"
    assert done.stderr.startswith("ckpt-run: hook in process ")


def test_disabled_it_only_chains(sandbox: Sandbox) -> None:
    users = sandbox.package("users", USERS)
    code = "import sys; print(sys.users_ran, [f for f in sys.meta_path if type(f).__module__ == 'sitecustomize'])"
    assert python(sandbox, code, path=f"{HOOK}:{users}", CKPT_RUN_DISABLE="1").stdout == "1 []\n"
    assert python(sandbox, code, path=f"{HOOK}:{users}").stdout.startswith("1 [<sitecustomize.TrainerFinder")


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_switches_against_it_are_respected(sandbox: Sandbox, flag: str) -> None:
    assert python(sandbox, REPORT, flag).stdout == "None\n"


@pytest.mark.parametrize("flag", ["-P", "-s", "-B", "-O"])
def test_other_switches_leave_it_in_place(sandbox: Sandbox, flag: str) -> None:
    if flag == "-P" and sys.version_info < (3, 11):
        flag = "-s"
    assert python(sandbox, REPORT, flag).stdout == f"{SOURCE}\n"


# --- chaining ------------------------------------------------------------------------------------------------------------


def test_a_sitecustomize_behind_ours_runs_and_is_the_one_in_sys_modules(sandbox: Sandbox) -> None:
    users = sandbox.package("users", USERS)
    code = f"import sys; print(sys.users_ran); {REPORT}"
    assert python(sandbox, code, path=f"{HOOK}:{users}").stdout == f"1\n{users}/sitecustomize.py\n"


def test_a_sitecustomize_before_ours_wins(sandbox: Sandbox) -> None:
    users = sandbox.package("users", USERS)
    code = f"import sys; print(sys.users_ran); {REPORT}"
    assert python(sandbox, code, path=f"{users}:{HOOK}").stdout == f"1\n{users}/sitecustomize.py\n"


def test_every_copy_of_our_folder_is_out_of_the_way_meanwhile(sandbox: Sandbox) -> None:
    users = sandbox.package(
        "users", {"sitecustomize.py": "import sys; sys.path_meanwhile = list(sys.path)\n"}
    )
    link = sandbox.path / "link"
    link.symlink_to(HOOK)
    path = f"{HOOK}:{link}:{users}:{HOOK}/"
    code = "import sys; print([p in sys.path_meanwhile for p in sys.argv[1:]], [p in sys.path for p in sys.argv[1:]])"
    done = sandbox.plain(sys.executable, "-c", code, HOOK, str(link), users, env={"PYTHONPATH": path})
    assert done.stdout == "[False, False, True] [True, True, True]\n"


def test_sys_path_is_what_it_was_and_keeps_what_the_users_file_added(sandbox: Sandbox) -> None:
    users = sandbox.package("users", {"sitecustomize.py": "import sys; sys.path.append('/added')\n"})
    code = "import sys; print(sys.path[1:3], sys.path[-1])"
    assert python(sandbox, code, path=f"{HOOK}:{users}").stdout == f"['{HOOK}', '{users}'] /added\n"


def test_ours_alone_stays_in_sys_modules(sandbox: Sandbox) -> None:
    assert python(sandbox, REPORT).stdout == f"{SOURCE}\n"


@pytest.mark.parametrize(
    "broken",
    ["import no_such_module_at_all", "raise ValueError('users')", "syntax error here", "raise SystemExit(3)"],
)
def test_an_error_in_the_users_file_is_reported_as_without_us(sandbox: Sandbox, broken: str) -> None:
    users = sandbox.package("users", {"sitecustomize.py": broken + "\n"})
    plain = python(sandbox, "print(1)", path=users)
    hooked = python(sandbox, "print(1)", path=f"{HOOK}:{users}")
    last = plain.stderr.splitlines()[-1:]
    assert (hooked.returncode, hooked.stdout, hooked.stderr.splitlines()[-1:]) == (
        plain.returncode,
        plain.stdout,
        last,
    )


def test_a_users_file_that_breaks_does_not_cost_the_hook(sandbox: Sandbox) -> None:
    users = sandbox.package("users", {"sitecustomize.py": "raise ValueError('users')\n"})
    code = "import sys; print(type(sys.meta_path[0]).__name__)"
    assert python(sandbox, code, path=f"{HOOK}:{users}").stdout == "TrainerFinder\n"


# --- children ------------------------------------------------------------------------------------------------------------

CHILDREN = """
import multiprocessing, sys
def hooked():
    return type(sys.meta_path[0]).__name__
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.apply(hooked))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_kind_are_hooked(sandbox: Sandbox, method: str) -> None:
    done = sandbox.run(sys.executable, sandbox.script("children.py", CHILDREN), method)
    assert (done.stdout, done.stderr) == ("TrainerFinder\n", "")


def test_a_module_run_as_a_program_and_pip_are_undisturbed(sandbox: Sandbox) -> None:
    assert sandbox.run(sys.executable, "-m", "platform").returncode == 0
    assert sandbox.run(sys.executable, "-m", "pip", "--version").stdout.startswith("pip ")


# --- other environments --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment into which nothing was installed."""
    path = tmp_path_factory.mktemp("environment") / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True, timeout=60)
    return str(path / "bin/python")


def test_in_an_environment_without_anything_datastates_is_found(sandbox: Sandbox, bare: str) -> None:
    assert sandbox.plain(bare, "-c", "import datastates").returncode == 1
    code = "import datastates, datastates.store.layout; print(datastates.__file__)"
    done = sandbox.run(bare, "-c", code)
    assert done.stdout == f"{Path(HOOK).parent}/__init__.py\n"
    shadowed = f"import importlib.util as u; print([u.find_spec(n) for n in {sorted(os.listdir(Path(HOOK).parents[1]))!r} if n != 'datastates'])"
    assert "ModuleSpec" not in sandbox.run(bare, "-c", shadowed).stdout


def test_an_installed_datastates_comes_first(sandbox: Sandbox, bare: str) -> None:
    users = sandbox.package("users", {"datastates/__init__.py": "mine = True\n"})
    done = sandbox.plain(
        bare, "-c", "import datastates; print(datastates.mine)", env={"PYTHONPATH": f"{HOOK}:{users}"}
    )
    assert done.stdout == "True\n"


def test_the_name_alone_in_pythonpath_is_enough(sandbox: Sandbox) -> None:
    shell = f'eval "$(ckpt-run env)"; PYTHONPATH=$CHECKPOINT_VENDOR {sys.executable} -c "{REPORT}"'
    assert sandbox.plain("sh", "-c", shell).stdout == f"{SOURCE}\n"
