# ruff: noqa: N807, RET503, RUF005, SIM105, UP004, UP024, UP031, UP036
"""The injected hook: every Python that is started with this folder in PYTHONPATH runs this file before anything else.

It decorates each Trainer that the process builds, and the saves of training loops that use DeepSpeed's engines or
accelerate without a Trainer; otherwise it leaves no trace. So at start-up it imports nothing that the interpreter has
not imported itself, prints nothing and raises nothing of its own; what it does is

1. fill in the settings of the launcher, where another program has dropped them from the environment;
2. put two finders on ``sys.meta_path``. One waits for ``transformers.trainer`` and, once that module has been executed,
   wraps ``Trainer.__init__``; likewise for the modules of ``LOOPS``, whose methods it wraps, and for the module with which
   deepspeed's launcher reaches other nodes. The other stands last in line and finds ``datastates``, in an environment it
   is not installed into;
3. import the ``sitecustomize`` that this file hides, if there is one.

``CKPT_RUN_DISABLE=1`` leaves only step 3; ``CKPT_RUN_DEBUG=1`` tells on stderr what was done. The file is written for
any interpreter that may come by (2.7 and 3.6 as well): hence no annotations and no f-strings.
"""

import os
import sys

HOOK = os.path.dirname(os.path.abspath(__file__))
TRAINER = "transformers.trainer"
LOOPS = {  # by module: its class, the methods that save and load, and where they are answered
    "deepspeed.runtime.engine": ("DeepSpeedEngine", ("save_checkpoint", "load_checkpoint"), "deepspeed_loop"),
    "accelerate.accelerator": ("Accelerator", ("save_state", "load_state"), "accelerate_loop"),
}
NODES = "deepspeed.launcher.multinode_runner"
PATCHED = (TRAINER, NODES) + tuple(LOOPS)
FAILED = set()
OFFLINE_ERRORS = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")


def debug(text):
    """Tell what the hook does, to a person who asked for it."""
    if os.environ.get("CKPT_RUN_DEBUG"):
        say("hook in process %d: %s" % (os.getpid(), text))


def say(text):
    try:
        sys.stderr.write("ckpt-run: %s\n" % text)
    except (AttributeError, EnvironmentError, ValueError):  # stderr is closed, or there never was one
        pass


# --- 1. settings that did not arrive -----------------------------------------------------------------------------------


def unpack_carrier():
    """Set what PYTHON_CKPT_RUN carries and the environment lacks.

    A launcher that reaches other hosts (deepspeed) hands on only variables whose names start with PYTHON, so the
    settings travel in one of that name: base64url of a JSON object. Where they arrived by themselves there is nothing
    to do, and nothing is imported.
    """
    carrier = os.environ.get("PYTHON_CKPT_RUN")
    if not carrier or os.environ.get("CKPT_RUN_RUN_ID"):
        return
    import base64
    import json

    try:
        carried = json.loads(base64.urlsafe_b64decode(carrier.encode("ascii")).decode("utf-8"))
        for name, value in carried.items():
            os.environ.setdefault(str(name), str(value))
    except (ValueError, AttributeError, TypeError) as error:
        debug("PYTHON_CKPT_RUN cannot be read: %s" % error)
    else:
        debug("took %s from PYTHON_CKPT_RUN" % ", ".join(sorted(carried)))


# --- 2. the finders ----------------------------------------------------------------------------------------------------


class TrainerFinder(object):
    """Answers for a few module names, with the spec that the other finders give and a loader that also patches."""

    def __init__(self):
        self._asking = False
        self._explains = not os.environ.get("CKPT_RUN_OFFLINE")

    def find_spec(self, name, path=None, target=None):
        if not self._explains and name == "huggingface_hub":
            self._explains = True
            explain_offline_errors()
        if name not in PATCHED or self._asking:
            return None
        self._asking = True
        try:
            spec = self._ask_the_others(name, path, target)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            patch_after_exec(spec.loader, name)
        return spec

    def _ask_the_others(self, name, path, target):
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if finder is not self and find_spec is not None else None
            if spec is not None:
                return spec
        return None


class PackageFinder(object):
    """Finds the package that this folder belongs to; last in line, so that an installed one comes first."""

    def find_spec(self, name, path=None, target=None):
        if name != "datastates":
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [os.path.dirname(os.path.dirname(HOOK))])


def patch_after_exec(loader, name):
    """Have this loader patch the module ``name`` when it has executed it.

    Only ``exec_module`` of this one object is wrapped: replacing the loader would break what asks it for more
    (``python -m``, zipimport, pkg_resources).
    """
    exec_module = getattr(loader, "exec_module", None)
    if exec_module is None or getattr(exec_module, "ckpt_run", False):
        return

    def exec_and_patch(module):
        if module.__name__ != name:  # an importer of archives is one object for all its modules
            return exec_module(module)
        try:
            del loader.exec_module
        except AttributeError:
            pass
        exec_module(module)
        if name == TRAINER:
            patch_trainer(module)
        elif name == NODES:
            patch_exports(module)
        else:
            patch_loop(module)

    exec_and_patch.ckpt_run = True
    try:
        loader.exec_module = exec_and_patch
    except (AttributeError, TypeError) as error:
        debug("cannot wait for %s: %s" % (name, error))


def patch_trainer(module):
    """Attach to every Trainer when it has been built. Subclasses inherit it; ``inspect.signature`` sees the original."""
    trainer_class = getattr(module, "Trainer", None)
    original = getattr(trainer_class, "__init__", None)
    if original is None or getattr(original, "ckpt_run", False):
        return
    prepare()
    import functools

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        output_dir = getattr(getattr(self, "args", None), "output_dir", None)
        register_process(output_dir)
        attach(self, output_dir)

    __init__.ckpt_run = True
    trainer_class.__init__ = __init__
    debug("Trainer is decorated")


def patch_loop(module):
    """Wrap the methods that save and load; nothing of ours is imported before one of them is called."""
    class_name, methods, answers = LOOPS[module.__name__]
    owner = getattr(module, class_name, None)
    for name in methods:
        original = getattr(owner, name, None)
        if original is not None and not getattr(original, "ckpt_run", False):
            setattr(owner, name, wrapped(original, name, answers))
    debug("%s is decorated" % class_name)


def wrapped(original, name, answers):
    import functools

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        answer = loop_answer(answers, name)
        if answer is None:
            return original(self, *args, **kwargs)
        return answer(original, self, *args, **kwargs)

    method.ckpt_run = True
    return method


def patch_exports(module):
    """Have deepspeed's launcher hand our variables to other nodes as they are here, and this folder first in PYTHONPATH.

    It puts the working directory in front, where a ``sitecustomize`` would hide this one; and lines of a file
    ``.deepspeed_env``, where ``accelerate launch`` may have left the variables of an older launch, count more than the
    environment.
    """
    runner = getattr(module, "MultiNodeRunner", None)
    original = getattr(runner, "add_export", None)
    if original is None or getattr(original, "ckpt_run", False):
        return
    import functools

    @functools.wraps(original)
    def add_export(self, key, var):
        name = key.strip()
        if name == "PYTHONPATH":
            entries = [entry for entry in var.strip().split(os.pathsep) if not is_ours(entry)]
            var = os.pathsep.join([HOOK] + entries)
        elif name == "PYTHON_CKPT_RUN":
            var = os.environ.get(name, "")
        elif name.startswith("CKPT_"):
            return None  # it is in PYTHON_CKPT_RUN, if it is for other nodes
        return original(self, key, var)

    add_export.ckpt_run = True
    runner.add_export = add_export
    debug("other nodes get this folder first in PYTHONPATH")


def loop_answer(module, name):
    """Our function for a method; None, once logged, where it cannot be had: the method does then what it always did."""
    if sys.version_info < (3, 10) or module in FAILED:
        return None
    import importlib

    try:
        answer = getattr(importlib.import_module("datastates.llm." + module), name)
    except Exception as error:  # noqa: BLE001 - training never dies of checkpointing
        import logging

        FAILED.add(module)
        logging.getLogger("datastates.llm").warning(
            "[Concurrent Checkpoint] checkpoints are saved as if not wrapped: %s", error
        )
        return None
    register_process(None)
    return answer


def register_process(output_dir):
    """Tell the launcher that this process trains, and where: it hands signals to such processes."""
    folder = os.environ.get("CKPT_RUN_PROCESSES")
    if not folder:
        return
    path = os.path.join(folder, str(os.getpid()))
    if output_dir is None and os.path.exists(path):
        return
    try:
        with open(path + ".new", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(os.path.abspath(str(output_dir)) if output_dir else "")
        os.rename(path + ".new", path)
    except (EnvironmentError, ValueError) as error:
        debug("cannot write %s: %s" % (path, error))


def prepare():
    """Teach transformers about our checkpoints: scripts call get_last_checkpoint before they build a Trainer."""
    if sys.version_info < (3, 10):
        return
    try:
        from datastates.llm import prepare as prepare_transformers

        prepare_transformers()
    except Exception as error:  # noqa: BLE001 - whatever it is, attach() meets it again and tells it
        debug("transformers could not be prepared: %r" % error)


def attach(trainer, output_dir):
    """Decorate one trainer. Whatever goes wrong is logged and the training runs as if not wrapped."""
    import logging

    logger = logging.getLogger("datastates.llm")
    if sys.version_info < (3, 10):
        logger.warning(
            "[Concurrent Checkpoint] Python %d.%d is too old (3.10 is needed): training runs as if not wrapped",
            sys.version_info[0],
            sys.version_info[1],
        )
        return
    try:
        from datastates.llm import attach as attach_to

        attach_to(trainer)
        note_output_dir(output_dir)
    except Exception:  # training never dies of checkpointing
        logger.exception(
            "[Concurrent Checkpoint] this Trainer could not be decorated: training runs as if not wrapped"
        )


def note_output_dir(output_dir):
    """Let the next launch of the same command find the checkpoints, and `status` too."""
    run_id = os.environ.get("CKPT_RUN_RUN_ID")
    if run_id and output_dir and os.environ.get("RANK", "0") == "0":
        from datastates.store import launches

        launches.note_output_dir(run_id, output_dir)


# --- a program that ends because the hub is out of reach ---------------------------------------------------------------


def explain_offline_errors():
    """After an uncaught error that comes from the launcher's offline variables, say so in one line."""
    previous = sys.excepthook

    def excepthook(kind, error, traceback):
        previous(kind, error, traceback)
        first_rank = os.environ.get("LOCAL_RANK", "0") in ("0", "-1")
        if first_rank and comes_from_offline_mode(error):
            say(
                "what the program asked for is in no local cache, and under ckpt-run nothing is downloaded "
                "(it set %s). To download it: ckpt-run --online COMMAND" % os.environ.get("CKPT_RUN_OFFLINE")
            )

    sys.excepthook = excepthook


def comes_from_offline_mode(error):
    """Whether the error, or one that led to it, is one of huggingface_hub's for things that are in no cache."""
    seen = set()
    while error is not None and id(error) not in seen:
        if type(error).__name__ in OFFLINE_ERRORS:
            return True
        if isinstance(error, OSError) and any("(%s)" % name in str(error) for name in OFFLINE_ERRORS):
            return True  # datasets keeps the name in its text and drops the error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


# --- 3. the sitecustomize behind this one ------------------------------------------------------------------------------


def is_ours(entry):
    try:
        return entry == HOOK or (bool(entry) and os.path.samefile(entry, HOOK))
    except (EnvironmentError, ValueError, TypeError):  # no such folder, or no path at all
        return False


def chain():
    """Import the sitecustomize that would have run without us; an error in it is its own and goes on as without us.

    Every copy of our folder leaves ``sys.path`` for that long: a nested ckpt-run may have added another.
    """
    ours = [(position, entry) for position, entry in enumerate(sys.path) if is_ours(entry)]
    this = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [entry for entry in sys.path if not is_ours(entry)]
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if "sitecustomize" not in (getattr(error, "name", None), str(error).split(" ")[-1]):
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this
    finally:
        for position, entry in ours:
            sys.path.insert(position, entry)


def start():
    if os.environ.get("CKPT_RUN_DISABLE") == "1":
        return
    unpack_carrier()
    if os.environ.get("CKPT_RUN_DISABLE") == "1" or sys.version_info < (3, 4):
        return
    sys.meta_path.insert(0, TrainerFinder())
    sys.meta_path.append(PackageFinder())
    debug("waiting for %s in Python %d.%d" % ((TRAINER,) + sys.version_info[:2]))


if __name__ == "sitecustomize":
    try:
        start()
    finally:
        chain()
