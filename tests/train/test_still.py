"""Promise 2: whatever happens to memory between a save and the fence, no committed checkpoint mixes two states.

All trainings here stage as late as possible (the fixture ``late``): memory that is said to hold still is read only when somebody waits at
the fence, so a change that came before it is seen. Beside each checkpoint stands a witness: copies of model and optimizer that the Trainer
took just before it saved. A checkpoint equals them or it is not committed; then the log names a tensor, and the next one is committed.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import runs
import tiny
import torch
import transformers
from checkpoints import same, whole
from datastates.llm import host_cache
from datastates.llm.fence import FENCE
from datastates.llm.still import StillTensor, still_tensors
from transformers import Trainer, TrainerCallback, set_seed

STEPS = [2, 4, 6, 8]


class Witness(Trainer):
    """Copies what is about to be saved."""

    copies: dict[int, tuple[dict[str, torch.Tensor], Any]]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.__dict__.setdefault("copies", {})[self.state.global_step] = (
            tiny.weights(self.accelerator.unwrap_model(self.model, keep_torch_compile=False)),
            copy.deepcopy(self.optimizer.state_dict()),
        )
        super()._save_checkpoint(model, trial)


class Net(torch.nn.Module):
    """A plain module with everything that training changes by other ways than the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        set_seed(0)
        self.embed = torch.nn.Embedding(128, 64)
        self.norm = torch.nn.BatchNorm1d(2048)
        self.up = torch.nn.Linear(64, 2048)
        self.head = torch.nn.Linear(2048, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.up(self.embed(input_ids)).transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def witness(output_dir: Path, model: torch.nn.Module | None = None, **how: Any) -> Witness:
    trainer = tiny.trainer(output_dir, model, cls=how.pop("cls", Witness), **how)
    return runs.decorate(trainer)


def agreeing(trainer: Witness, output_dir: Path) -> list[int]:
    """The committed steps, each of which has been found equal to its witness."""
    steps = whole(output_dir)
    for step in steps:
        weights, optimizer = trainer.copies[step]
        directory = runs.checkpoint(output_dir, step)
        found = checkpoints.weights(directory)
        differing = [name for name in found if not torch.equal(found[name], weights[name])]
        assert differing == [], f"checkpoint-{step}"
        assert found.keys() <= weights.keys()
        assert same(checkpoints.optimizer(directory), optimizer), f"checkpoint-{step}"
    return steps


def _only_error(caplog: pytest.LogCaptureFixture) -> str:
    [message] = [record.message for record in caplog.records if record.levelname == "ERROR"]
    return message


class At(TrainerCallback):
    """Does something to model and optimizer at the first event of a kind after the save of ``step``, once or each time."""

    def __init__(self, event: str, steps: list[int], action: Callable[[Any, Any], None]) -> None:
        self.steps = steps
        self.done = 0

        def at(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in self.steps:
                action(kwargs["model"], kwargs["optimizer"].optimizer)
                self.done += 1

        setattr(self, event, at)


# -- what holds still -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad"]
)
def test_each_optimizer_is_staged_late_and_saved_as_it_was(optim: str, late: Any, tmp_path: Path) -> None:
    trainer = witness(tmp_path, optim=optim, learning_rate=0.01)
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS
    assert late.late_bytes > 4 * 80_000


def test_foreach_adamw_is_saved_as_it_was(late: Any, tmp_path: Path) -> None:
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    trainer = witness(tmp_path, model, optimizers=(optimizer, None))
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS
    assert late.late_bytes > 0


@pytest.mark.parametrize(
    "options",
    [
        dict(gradient_accumulation_steps=3),
        dict(gradient_checkpointing=True),
        dict(torch_compile=True, torch_compile_backend="eager"),
        dict(bf16=True),
        dict(save_steps=1, max_steps=6),
        dict(eval_strategy="epoch", save_steps=4, per_device_train_batch_size=16, max_steps=12),
        dict(save_strategy="epoch", max_steps=-1, num_train_epochs=3, per_device_train_batch_size=16),
        dict(save_only_model=False, dataloader_num_workers=1, max_steps=4),
    ],
    ids=lambda options: ", ".join(f"{key}={value}" for key, value in list(options.items())[:2]),
)
def test_each_way_to_train_saves_what_was_there(options: dict[str, Any], late: Any, tmp_path: Path) -> None:
    trainer = witness(tmp_path, learning_rate=0.01, **options)
    trainer.train()
    assert agreeing(trainer, tmp_path) == sorted(trainer.copies)
    assert len(trainer.copies) > 1
    assert late.late_bytes > 0


def test_tied_weights_are_saved_as_they_were(late: Any, tmp_path: Path) -> None:
    trainer = witness(tmp_path, tiny.llama(tie_word_embeddings=True), learning_rate=0.01)
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS


class Scripted(Witness):
    """Its evaluation finds ``losses``, one after another; the least is at the second save."""

    losses = (3.0, 1.0, 2.0, 2.5)
    at_end: dict[str, torch.Tensor]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        loss = self.losses[self.state.global_step // 2 - 1]
        metrics["eval_loss"] = loss
        return metrics


def test_the_last_checkpoint_survives_loading_a_best_model_that_is_not_the_last(
    late: Any, tmp_path: Path
) -> None:
    trainer = witness(
        tmp_path,
        cls=Scripted,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS
    assert trainer.state.best_model_checkpoint == str(runs.checkpoint(tmp_path, 4))
    assert same(tiny.weights(trainer.model), trainer.copies[4][0])
    assert not same(trainer.copies[8][0], trainer.copies[4][0])


def test_save_strategy_best_saves_the_better_ones_alone(late: Any, tmp_path: Path) -> None:
    trainer = witness(
        tmp_path,
        cls=Scripted,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="loss",
        greater_is_better=False,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert agreeing(trainer, tmp_path) == [2, 4]
    if int(transformers.__version__.split(".")[0]) >= 5:  # before, Trainer forgot which one was the best
        assert same(tiny.weights(trainer.model), trainer.copies[4][0])


def test_a_checkpoint_larger_than_the_host_cache_streams_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cache, "_engine", None)
    model = tiny.llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    trainer = tiny.trainer(tmp_path, model, cls=Witness, max_steps=4, save_steps=1, learning_rate=0.01)
    runs.decorate(trainer, host_cache_size=0.01)
    trainer.train()
    assert (
        sum(len(data) for data in checkpoints.tree(runs.checkpoint(tmp_path, 4)).values()) > 4 * 0.01 * 2**30
    )
    assert agreeing(trainer, tmp_path) == [1, 2, 3, 4]


def test_batch_norm_statistics_are_those_of_the_saved_step(late: Any, tmp_path: Path) -> None:
    trainer = witness(tmp_path, Net(), learning_rate=0.01)
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS
    assert not torch.equal(
        trainer.copies[2][0]["norm.running_mean"], trainer.copies[4][0]["norm.running_mean"]
    )


# -- callbacks ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _no_grad_mul(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.01)


def _data_mul(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


def _numpy(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] += 0.5


def _one_element_of_data(model: Any, optimizer: Any) -> None:
    next(model.parameters()).data[64, 17] += 1.0


@torch.no_grad()
def _one_element(model: Any, optimizer: Any) -> None:
    next(model.parameters())[64, 17] += 1.0


def _state(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


EVENTS = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step"]
CHANGES = [_no_grad_mul, _data_mul, _numpy, _one_element, _one_element_of_data, _state]


@pytest.mark.parametrize(
    ("change", "event"),
    [(change, EVENTS[0]) for change in CHANGES] + [(_one_element_of_data, event) for event in EVENTS[1:]],
)
def test_a_change_by_a_callback_before_the_step_is_not_in_the_checkpoint(
    change: Callable[[Any, Any], None], event: str, late: Any, tmp_path: Path
) -> None:
    callback = At(event, [4, 8], change)
    trainer = witness(
        tmp_path, callbacks=[callback], gradient_accumulation_steps=2 if event == "on_substep_end" else 1
    )
    trainer.train()
    assert callback.done == 1
    assert agreeing(trainer, tmp_path) == STEPS
    assert late.late_bytes > 0


def test_a_frozen_parameter_that_a_callback_averages_into_is_saved_as_it_was(
    late: Any, tmp_path: Path
) -> None:
    model = tiny.llama()
    average, source = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    average.requires_grad_(False)
    # All parameters are the optimizer's, as scripts often have it, although one of them is never changed by it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def forward_average(module: Any, args: Any) -> None:
        average.data.lerp_(source.data, 0.1)

    model.register_forward_pre_hook(forward_average)
    trainer = witness(tmp_path, model, optimizers=(optimizer, None))
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS


def _everything_past_autograd(weight: torch.Tensor) -> None:
    weight.data.mul_(0.999)


@torch.no_grad()
def _one_element_of_it(weight: torch.Tensor) -> None:
    weight[50, 19] += 1.0


@pytest.mark.parametrize("change", [_everything_past_autograd, _one_element_of_it])
def test_a_torn_snapshot_is_not_committed_and_names_the_tensor_which_is_then_copied_at_once(
    change: Callable[[torch.Tensor], None], late: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    model.register_forward_pre_hook(lambda module, args: change(weight))
    trainer = witness(tmp_path, model)
    trainer.train()
    assert agreeing(trainer, tmp_path) == [4, 6, 8]
    assert "checkpoint-2 was not committed" in _only_error(caplog)
    assert "model.layers.0.mlp.up_proj.weight" in _only_error(caplog)
    assert late.late_bytes > 0


def test_memory_that_a_parameter_shares_with_a_buffer_is_not_still() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert still_tensors([optimizer], model, set()).keys() == {model.weight.data_ptr()}
    model.register_buffer("average", model.weight.detach()[3])
    assert still_tensors([optimizer], model, set()) == {}


# -- optimizers that do not keep to the rules -------------------------------------------------------------------------------


def _descend(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.1)


class Own(torch.optim.SGD):
    """A class of its own, so that a replaced ``step`` stays within one test."""


@pytest.mark.parametrize("of", ["instance", "class"])
@pytest.mark.parametrize("since", [0, 3])
def test_the_memory_of_an_optimizer_whose_step_was_replaced_is_copied_at_once(
    of: str, since: int, late: Any, tmp_path: Path
) -> None:
    trainer = _with_replaced_step(of, since, tmp_path)
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS


def test_a_step_replaced_just_before_the_save_costs_one_checkpoint_that_is_named(
    late: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _with_replaced_step("instance", 4, tmp_path)
    trainer.train()
    assert agreeing(trainer, tmp_path) == [2, 6, 8]
    assert "checkpoint-4 was not committed" in _only_error(caplog)
    assert ".weight" in _only_error(caplog)


def _with_replaced_step(of: str, since: int, output_dir: Path) -> Witness:
    """From the end of step ``since`` on the optimizer does without the hooks of ``step``."""
    kind = type("Fresh", (Own,), {})

    def step(self: Any, closure: Any = None) -> None:
        _descend(parameter for group in self.param_groups for parameter in group["params"])

    def replace(model: Any, optimizer: Any) -> None:
        if of == "class":
            kind.step = step
        else:
            optimizer.step = types.MethodType(step, optimizer)

    model = tiny.llama()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    if since == 0:
        replace(model, optimizer)
    return witness(
        output_dir, model, optimizers=(optimizer, None), callbacks=[At("on_step_end", [since], replace)]
    )


class NoStep(torch.optim.SGD):
    """Its updates happen inside backward; ``step`` has nothing left to do, but fires the hooks."""

    def step(self, closure: Any = None) -> None:
        return None


def _by_hand(model: Any) -> torch.optim.Optimizer:
    def update(parameter: torch.Tensor) -> None:
        _descend([parameter])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return NoStep(model.parameters(), lr=0.1)


def _by_optimizers(model: Any) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    return NoStep(model.parameters(), lr=0.1)


@pytest.mark.parametrize("updating", [_by_hand, _by_optimizers])
def test_an_optimizer_that_updates_inside_backward_gets_an_eager_snapshot(
    updating: Callable[[Any], torch.optim.Optimizer], late: Any, tmp_path: Path
) -> None:
    model = tiny.llama()
    optimizer = updating(model)
    trainer = witness(tmp_path, model, optimizers=(optimizer, None), max_grad_norm=0.0)
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS
    assert not same(trainer.copies[2][0], trainer.copies[4][0])


class Swapping(torch.optim.AdamW):
    """Schedule-free style: in evaluation the weights are others, swapped in place."""

    training = True

    def eval(self) -> None:
        self._swap(training=False, factor=0.5)

    def train(self) -> None:
        self._swap(training=True, factor=2.0)

    def _swap(self, training: bool, factor: float) -> None:
        if self.training != training:
            self.training = training
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(factor)


def test_an_optimizer_that_swaps_weights_between_training_and_evaluation_is_saved_as_it_was(
    late: Any, tmp_path: Path
) -> None:
    model = tiny.llama()
    optimizer = Swapping(model.parameters(), lr=0.01)
    trainer = witness(tmp_path, model, optimizers=(optimizer, None), eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS


class Inference(torch.optim.SGD):
    """Keeps its momentum in inference tensors, which have no version counter."""

    @torch.inference_mode()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trace = self.state[parameter].setdefault("trace", torch.zeros_like(parameter))
                trace.mul_(0.9).add_(parameter.grad)
                parameter.add_(trace, alpha=-0.1)


def test_inference_tensors_are_saved_as_they_were(late: Any, tmp_path: Path) -> None:
    model = tiny.llama()
    optimizer = Inference(model.parameters(), lr=0.1)
    trainer = witness(tmp_path, model, optimizers=(optimizer, None))
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS
    assert all(state["trace"].is_inference() for state in optimizer.state.values())
    assert late.late_bytes > 0
    assert StillTensor.of("trace", optimizer.state[next(model.parameters())]["trace"]).disturbed() is None


# -- memory that goes away --------------------------------------------------------------------------------------------------


def _share(weight: torch.nn.Parameter) -> None:
    weight.data.share_memory_()


def _resize(weight: torch.nn.Parameter) -> None:
    kept, storage = weight.detach().clone(), weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    weight.data.copy_(kept)


def _resize_larger(weight: torch.nn.Parameter) -> None:
    weight.untyped_storage().resize_(weight.untyped_storage().nbytes() * 64)


def _replace_data(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 1.5


def _set(weight: torch.nn.Parameter) -> None:
    weight.data.set_(weight.detach().clone())


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("move", [_share, _resize, _resize_larger, _replace_data, _set])
def test_a_storage_that_moves_during_forward_costs_at_most_one_checkpoint(
    move: Callable[[Any], None], size: str, late: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``large``: beyond malloc's mmap threshold, so that the old address is unmapped and a plain read there would crash."""
    model = tiny.llama() if size == "small" else tiny.llama(intermediate_size=2048, hidden_size=64)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert (weight.nbytes > 2**18) == (size == "large")
    calls: list[int] = []

    def before_forward(module: Any, args: Any) -> None:
        calls.append(0)
        if len(calls) == 3:  # the first forward after the save of step 2
            move(weight)

    model.register_forward_pre_hook(before_forward)
    trainer = witness(tmp_path, model)
    trainer.train()
    steps = agreeing(trainer, tmp_path)
    assert steps in (STEPS, STEPS[1:])
    if steps != STEPS:
        assert "checkpoint-2 was not committed" in _only_error(caplog)
        assert "model.layers.0.mlp.up_proj.weight" in _only_error(caplog)


# -- saves of other kinds ---------------------------------------------------------------------------------------------------


class OutOfMemoryOnce(Witness):
    """As a GPU that is too small for the first batch size: step 4 fails, once."""

    failed = False

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 3 and not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(*args, **kwargs)


def test_auto_find_batch_size_keeps_the_checkpoints_of_the_batch_size_that_fitted(
    late: Any, tmp_path: Path
) -> None:
    trainer = witness(tmp_path, cls=OutOfMemoryOnce, auto_find_batch_size=True, per_device_train_batch_size=8)
    trainer.train()
    assert trainer.failed
    assert trainer.state.global_step == 8
    assert agreeing(trainer, tmp_path) == STEPS
    assert len({runs.lineage_of(tmp_path, step) for step in STEPS}) == 1


def test_two_trainings_in_one_process_do_not_disturb_each_other(late: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        trainer = witness(tmp_path / name, tiny.llama(seed=len(name)), learning_rate=0.01)
        trainer.train()
        assert agreeing(trainer, tmp_path / name) == STEPS


def test_saving_one_step_twice_keeps_the_first(late: Any, tmp_path: Path) -> None:
    def save_again(model: Any, optimizer: Any) -> None:
        trainer._save_checkpoint(model, None)

    trainer = witness(tmp_path, callbacks=[At("on_step_begin", [2], save_again)])
    trainer.train()
    assert agreeing(trainer, tmp_path) == STEPS


def test_nothing_is_left_at_the_fence_when_training_has_ended(late: Any, tmp_path: Path) -> None:
    witness(tmp_path).train()
    assert not FENCE.busy
