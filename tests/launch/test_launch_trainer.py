"""The hook decorates each Trainer once, and whatever goes wrong there the training runs as if not wrapped.

The mechanics are tried on a small package named transformers; one test at the end takes the real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import HOOK, Sandbox

TRAINER = '''
class Args:
    output_dir = "some/out"

class Trainer:
    def __init__(self, model=None, *, args=None):
        """Builds a trainer."""
        self.model = model
        self.args = Args()
'''
PACKAGE = {"transformers/__init__.py": "", "transformers/trainer.py": TRAINER}
ATTACH = "def attach(trainer):\n    print('attached', type(trainer).__name__, trainer.model)\n"
LIBRARY = {
    "datastates/__init__.py": "",
    "datastates/llm/__init__.py": ATTACH,
    "datastates/store/__init__.py": "",
    "datastates/store/launches.py": "def note_output_dir(run_id, path): pass\n",
}


@pytest.fixture
def bare(sandbox: Sandbox) -> Python:
    return Python(sandbox)


class Python:
    """A bare environment in which transformers and datastates are small stand-ins."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", sandbox.path / "bare"], check=True, timeout=60
        )
        self.program = str(sandbox.path / "bare/bin/python")
        self.packages = sandbox.package("packages", {**PACKAGE, **LIBRARY})

    def run(
        self, code: str, *flags: str, hooks: str = HOOK, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": f"{hooks}:{self.packages}", **variables}
        return self.sandbox.plain(self.program, "-W", "error", *flags, "-c", code, env=env)


BUILD = "from transformers.trainer import Trainer; Trainer(5)"


def test_a_trainer_is_attached_to_when_it_has_been_built(bare: Python) -> None:
    assert bare.run(BUILD).stdout == "attached Trainer 5\n"


def test_a_subclass_inherits_it_and_is_attached_to_once(bare: Python) -> None:
    code = "from transformers.trainer import Trainer\nclass Mine(Trainer):\n    def __init__(self): super().__init__(6)\nMine()"
    assert bare.run(code).stdout == "attached Mine 6\n"


def test_the_signature_the_docstring_and_the_original_are_kept(bare: Python) -> None:
    code = (
        "import inspect; from transformers.trainer import Trainer as T; "
        "print(inspect.signature(T.__init__), T.__init__.__doc__, T.__init__.__wrapped__.__name__, 'self.model' in inspect.getsource(T.__init__))"
    )
    assert bare.run(code).stdout == "(self, model=None, *, args=None) Builds a trainer. __init__ True\n"


def test_a_reload_is_patched_again_and_nothing_is_patched_twice(bare: Python) -> None:
    code = f"{BUILD}; import importlib, transformers.trainer as t; importlib.reload(t); t.Trainer(7)"
    assert bare.run(code).stdout == "attached Trainer 5\nattached Trainer 7\n"


def test_two_copies_of_the_hook_patch_once(bare: Python) -> None:
    other = bare.sandbox.package("other", {"sitecustomize.py": Path(HOOK, "sitecustomize.py").read_text()})
    assert bare.run(BUILD, hooks=f"{HOOK}:{other}").stdout == "attached Trainer 5\n"


def test_looking_for_the_module_neither_imports_nor_patches(bare: Python) -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.find_spec('transformers.trainer'); "
        "print(type(spec.loader).__name__, 'transformers.trainer' in sys.modules)"
    )
    assert bare.run(code).stdout == "SourceFileLoader False\n"


def test_the_loader_is_left_as_it_was(bare: Python) -> None:
    code = "import transformers.trainer as t; print(t.__loader__.__dict__.keys(), t.__spec__.loader is t.__loader__)"
    assert bare.run(code).stdout == "dict_keys(['name', 'path']) True\n"


def test_the_module_can_be_run_as_a_program(bare: Python) -> None:
    env = {"PYTHONPATH": f"{HOOK}:{bare.packages}"}
    assert bare.sandbox.plain(bare.program, "-m", "transformers.trainer", env=env).returncode == 0


def test_a_package_in_an_archive_is_patched_too(bare: Python) -> None:
    code = "import shutil; shutil.make_archive('packed', 'zip', 'packages')"
    bare.sandbox.plain(sys.executable, "-c", code)
    code = f"import sys; sys.path.insert(0, 'packed.zip'); {BUILD}; import transformers.trainer as t; print(t.__file__)"
    assert bare.run(code).stdout == "attached Trainer 5\npacked.zip/transformers/trainer.py\n"


def test_an_error_while_attaching_is_logged_and_training_goes_on(bare: Python) -> None:
    bare.sandbox.package(
        "packages", {"datastates/llm/__init__.py": "def attach(trainer):\n    raise ValueError('no disk')\n"}
    )
    done = bare.run(f"import logging; logging.basicConfig(); {BUILD}; print('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "ERROR:datastates.llm:[Concurrent Checkpoint]" in done.stderr
    assert "ValueError: no disk" in done.stderr


def test_a_library_that_cannot_be_imported_is_logged_and_training_goes_on(bare: Python) -> None:
    bare.sandbox.package("packages", {"datastates/llm/__init__.py": "import no_such_library\n"})
    done = bare.run(f"{BUILD}; print('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "no_such_library" in done.stderr


def test_an_error_of_the_trainers_own_is_its_own(bare: Python) -> None:
    done = bare.run("from transformers.trainer import Trainer; Trainer(no_such=1)")
    assert done.returncode == 1
    assert "unexpected keyword argument" in done.stderr
    assert "Concurrent Checkpoint" not in done.stderr


def test_a_module_that_fails_to_import_fails_as_without_us(bare: Python) -> None:
    bare.sandbox.package("packages", {"transformers/trainer.py": "raise RuntimeError('broken')\n"})
    done = bare.run("import transformers.trainer")
    assert done.stderr.endswith("RuntimeError: broken\n")


def test_an_interpreter_without_transformers_is_undisturbed(bare: Python) -> None:
    done = bare.run(
        "import sys; sys.path.pop(2)\ntry:\n    import transformers.trainer\nexcept ImportError as e: print(e)"
    )
    assert (done.stdout, done.stderr) == ("No module named 'transformers'\n", "")


def test_disabled_no_trainer_is_touched(bare: Python) -> None:
    assert bare.run(BUILD, CKPT_RUN_DISABLE="1").stdout == ""


def test_the_process_registers_itself_with_its_output_directory(bare: Python) -> None:
    folder = bare.sandbox.path / "registered"
    folder.mkdir()
    done = bare.run(f"import os; {BUILD}; print(os.getpid())", CKPT_RUN_PROCESSES=str(folder))
    pid = done.stdout.split()[-1]
    assert [path.name for path in folder.iterdir()] == [pid]
    assert (folder / pid).read_text() == str(bare.sandbox.path / "some/out")


def test_a_folder_that_is_gone_disturbs_nothing(bare: Python) -> None:
    done = bare.run(BUILD, CKPT_RUN_PROCESSES="/nowhere")
    assert (done.stdout, done.stderr) == ("attached Trainer 5\n", "")


def test_below_another_ckpt_run_there_is_one_patch(bare: Python) -> None:
    words = ("ckpt-run", bare.program, "-c", BUILD)
    assert bare.sandbox.run(*words, env={"PYTHONPATH": bare.packages}).stdout == "attached Trainer 5\n"


# --- what is in no cache -------------------------------------------------------------------------------------------------

HUB = {
    "huggingface_hub/__init__.py": "class LocalEntryNotFoundError(FileNotFoundError): pass\n",
}
ASK = """
import huggingface_hub
def ask():
    try:
        raise huggingface_hub.LocalEntryNotFoundError("no such entry")
    except OSError as error:
        raise OSError("cannot load the tokenizer") from error
"""


def offline_end(bare: Python, code: str, *options: str, **variables: str) -> str:
    bare.sandbox.package("packages", HUB)
    script = bare.sandbox.script("ask.py", ASK + code)
    done = bare.sandbox.run(*options, bare.program, script, env={"PYTHONPATH": bare.packages, **variables})
    assert done.returncode == 1
    assert "OSError: cannot load the tokenizer" in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_program_that_ends_because_nothing_is_downloaded_gets_one_line(bare: Python) -> None:
    last = offline_end(bare, "ask()")
    assert last.startswith("ckpt-run: ")
    assert "ckpt-run --online COMMAND" in last


def test_no_line_when_downloads_are_on_or_off_by_the_users_wish(bare: Python) -> None:
    assert "ckpt-run" not in offline_end(bare, "ask()", "--online")
    theirs = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    assert "ckpt-run" not in offline_end(bare, "ask()", **theirs)


def test_a_program_that_copes_gets_no_line(bare: Python) -> None:
    code = "try:\n    ask()\nexcept OSError:\n    pass\nraise OSError('cannot load the tokenizer') from None"
    bare.sandbox.package("packages", HUB)
    done = bare.sandbox.run(
        bare.program, "-c", "import huggingface_hub; 1/0", env={"PYTHONPATH": bare.packages}
    )
    assert "ckpt-run" not in done.stderr.splitlines()[-1]
    assert "ckpt-run" not in offline_end(bare, code)


def test_a_programs_own_excepthook_is_called(bare: Python) -> None:
    code = "import sys\nprevious = sys.excepthook\ndef mine(*error):\n    print('mine', file=sys.stderr)\n    previous(*error)\nsys.excepthook = mine\nask()"
    assert offline_end(bare, code).startswith("ckpt-run: ")


@pytest.mark.parametrize(
    "code",
    [
        "from datasets import load_dataset; load_dataset('no-such/data')",
        "from huggingface_hub import snapshot_download; snapshot_download('no-such/model')",
        "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('no-such/model')",
    ],
    ids=["datasets", "huggingface_hub", "transformers"],
)
def test_the_real_libraries_errors_are_recognised(sandbox: Sandbox, code: str) -> None:
    done = sandbox.run(sys.executable, "-c", code)
    assert done.returncode == 1
    assert "ckpt-run --online COMMAND" in done.stderr.splitlines()[-1]


# --- the real thing ------------------------------------------------------------------------------------------------------


def test_the_real_trainer_is_decorated_however_it_is_imported(sandbox: Sandbox) -> None:
    code = (
        "import transformers, sys; print('transformers.trainer' in sys.modules); "
        "from transformers import Trainer, Seq2SeqTrainer; import inspect; "
        "print(Trainer.__init__.ckpt_run, Seq2SeqTrainer.__mro__[1] is Trainer, list(inspect.signature(Trainer).parameters)[0])"
    )
    done = sandbox.run(sys.executable, "-c", code)
    assert done.stdout == "False\nTrue True model\n", done.stderr
