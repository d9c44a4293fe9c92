"""What is attached to one Trainer: the replaced methods, and the session of the ``train()`` call that runs.

Nine methods are replaced, on the instance:

===================== ==============================================================================================
train                 agree on the checkpoint to resume from, begin a session, wait for what is in flight at the end
_inner_training_loop  a second entry (auto_find_batch_size) is another training: a lineage of its own
get_batch_samples     none are left when it resumed at its last step
_get_output_dir       what it answered before, and concurrent_checkpoint below it
_save_checkpoint      the save scope
_load_best_model      wait until the best checkpoint is committed
_push_from_checkpoint after the scope, when the files are there
callback on_save      a callback that reads the files waits for them and finds them under ``args.output_dir``
callback call_event   a user's callback may change the model: it stands behind the fence
===================== ==============================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datastates.llm import fence, fingerprint, fsdp, instance, log, readers, resume, trainer_module
from datastates.llm.session import Session
from datastates.settings import Settings
from datastates.store.layout import CHECKPOINT_ROOT

logger = log.logger("datastates.llm.decorator")


class Attachment:
    """Holds the Trainer's replaced methods; built when the Trainer is, idle until ``train()``.

    ``settings`` may be replaced until ``train()`` begins.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self.settings = settings
        self._trainer = trainer
        self._session: Session | None = None
        self._loop_entries = 0
        fence.install()
        trainer_module.install(resume.last_checkpoint)
        resume.let_cpu_ranks_load()
        resume.announce_last_step(trainer.args.output_dir, fingerprint.of(trainer))
        for name, around in self._replacements().items():
            instance.wrap(trainer, name, around)
        instance.wrap(trainer.callback_handler, "on_save", self._on_save)
        instance.wrap(trainer.callback_handler, "on_train_end", self._on_train_end)
        instance.wrap(trainer.callback_handler, "call_event", self._call_event)

    def _replacements(self) -> dict[str, Callable[..., Any]]:
        return {
            "train": self._train,
            "_inner_training_loop": self._inner_training_loop,
            "get_batch_samples": self._get_batch_samples,
            "_get_output_dir": self._get_output_dir,
            "_save_checkpoint": self._save_checkpoint,
            "_load_best_model": self._load_best_model,
            "_push_from_checkpoint": self._push_from_checkpoint,
            # transformers before 5.1 keeps these as methods
            "_rotate_checkpoints": self._unless_root(None),
            "_sorted_checkpoints": self._unless_root([]),
        }

    def wait(self, timeout: float | None) -> bool:
        """Until every checkpoint in flight has its outcome."""
        return self._session is None or self._session.wait(timeout)

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = resume.Request.of(args, kwargs, trainer_module.is_stock(original))
        self._loop_entries = 0
        fence.install()  # again: DeepSpeed may have been loaded since
        self._session = session = Session.begin(
            self._trainer, self.settings, given, self._root(given.trial), self._session
        )
        try:
            if self._trainer.is_fsdp_enabled and session.resume_path is not None:
                fsdp.check_world_size(Path(session.resume_path), self._trainer.args.world_size)
            result = original(*given.args(session.resume_path), **given.kwargs(session.resume_path))
        except BaseException as error:
            session.end(error)
            raise
        session.end(None)
        return result

    def _inner_training_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loop_entries += 1
        if self._loop_entries > 1 and self._session is not None:
            self._session.start_over(self._loop_entries)
        return original(*args, **kwargs)

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Resumed at its last step in the middle of an epoch, stock Trainer would do one step more: it looks only after a step."""
        if self._session is None or not self._session.resumed_at_the_end:
            return original(*args, **kwargs)
        self._trainer.control.should_training_stop = True
        return [], None

    def _root(self, trial: Any) -> str:
        """The checkpoint root as this rank sees it before ``train()`` has set the trial up."""
        return os.path.join(type(self._trainer)._get_output_dir(self._trainer, trial), CHECKPOINT_ROOT)

    def _get_output_dir(self, original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        if self._session is not None and self._session.running:
            return self._session.root_now
        return os.path.join(original(*args, **kwargs), CHECKPOINT_ROOT)

    def _save_checkpoint(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        session = self._session
        if session is None or not session.running:
            original(*args, **kwargs)
            return
        session.save(lambda: original(*args, **kwargs))

    def _load_best_model(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.wait_for_readers("the best model is loaded")
        fence.FENCE.wait()
        original(*args, **kwargs)

    def _push_from_checkpoint(self, original: Callable[..., None], checkpoint_folder: str) -> None:
        if self._session is None or not self._session.in_scope:
            original(checkpoint_folder)
            return
        self._session.after_scope(lambda: original(checkpoint_folder), "push_to_hub uploads them")

    def _on_save(self, original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
        names = readers.readers(self._trainer.callback_handler.callbacks)
        # Not running: a shallow copy of this trainer trains, which shares the handler and saves by itself.
        if not names or self._session is None or not self._session.running:
            return original(args, *rest, **kwargs)
        self._session.wait_for_readers(f"{', '.join(names)} may read it in on_save")
        if self._session.newest_is_missing:
            return _nothing_was_saved(*rest, **kwargs)
        with _output_dir(args, self._session.root):
            return original(args, *rest, **kwargs)

    def _call_event(self, original: Callable[..., Any], event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_step_begin":
            fence.FENCE.optimizers.begin_step()
        if fence.FENCE.busy and readers.may_change_the_model(self._trainer.callback_handler.callbacks, event):
            fence.FENCE.wait()
        return original(event, *args, **kwargs)

    def _on_train_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._session is not None:
            self._session.wait_for_all()
        return original(*args, **kwargs)

    def _unless_root(self, answer: Any) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output_dir = kwargs.get("output_dir")
            if output_dir is not None and trainer_module.is_root(output_dir):
                return list(answer) if isinstance(answer, list) else answer
            return original(*args, **kwargs)

        return around


def _nothing_was_saved(state: Any, control: Any) -> Any:
    """Instead of ``on_save``: a callback that reads the checkpoint would fail, and the training with it."""
    control.should_save = False
    return control


@contextmanager
def _output_dir(args: Any, directory: str) -> Iterator[None]:
    before = args.output_dir
    args.output_dir = directory
    try:
        yield
    finally:
        args.output_dir = before
