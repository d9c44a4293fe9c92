"""A training loop of its own, without the Trainer: with DeepSpeed's engine, or with accelerate. See :class:`Job`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import faults  # noqa: E402
import sharding  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402

HOOK = Path(__file__).parents[3] / "runtime/datastates/_hook/sitecustomize.py"


@dataclass
class Job:
    """What to train; every field has a JSON form.

    ``way``: deepspeed or accelerate. ``hooked``: as under ckpt-run; False: as that tool itself saves; "script": the script asks for it.
    ``shard``: by what accelerate shards, deepspeed or fsdp (per rank: in files of each rank); misled: deepspeed, and each rank's accelerator believes to be alone. ``name``: of each checkpoint, with
    ``{step}`` in it or the same every time; empty: accelerate's automatic naming. ``main_only``: only the main process saves.
    ``orderly``: before each step everything saved so far has its outcome. ``read``: look into what ``latest`` leads to right after a save
    (deepspeed). ``swap``: DeepSpeed's engine saves as if its optimizer lived on NVMe. ``resume``: load the newest checkpoint first, if there
    is one; a text names it. ``counts``: after a load the script tells accelerate's automatic naming which number is next. ``settings``: environment variables.
    """

    output_dir: str
    log: str
    way: str = "deepspeed"
    hooked: bool | str = True
    shard: str = ""
    name: str = "step_{step}"
    steps: int = 8
    save_every: int = 2
    resume: bool | str = True
    main_only: bool = False
    orderly: bool = False
    read: bool = False
    pause: float = 0.0
    swap: bool = False
    counts: bool = True
    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 2})
    total_limit: int | None = None
    grace: float | None = None
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)


class Log:
    """As in train.py: a line for each loss, and one for the weights in the end."""

    def __init__(self, path: str) -> None:
        self.stream = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the process

    def write(self, **fields: Any) -> None:
        self.stream.write(json.dumps(fields) + "\n")


def hook() -> None:
    """Do to the modules that are loaded already what the hook does when they are loaded."""
    spec = importlib.util.spec_from_file_location("ckpt_run_hook", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in module.LOOPS:
        if name in sys.modules:
            module.patch_loop(sys.modules[name])


def batch(step: int, rank: int) -> torch.Tensor:
    """What a rank sees in a step; dropout follows from the step as well."""
    torch.manual_seed(1000 * step + rank)
    generator = torch.Generator().manual_seed(7 * step + rank)
    return torch.randint(0, 128, (4, 16), generator=generator)


def settle() -> None:
    from datastates.llm import loop

    for each in loop._loops.values():
        each.saver.wait(60)


def steps(job: Job, start: int, log: Log) -> Iterator[int]:
    for step in range(start + 1, job.steps + 1):
        time.sleep(job.pause)
        yield step
        if job.hooked and job.orderly:
            settle()


def digest(module: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(sharding.parts(module).items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def decorate(job: Job, **owner: Any) -> None:
    if job.hooked == "script":
        from datastates.llm import DecoratedCheckpointing

        DecoratedCheckpointing({**owner, "commit_timeout": 60}, -1)


# -- DeepSpeed ----------------------------------------------------------------------------------------------------------


def deepspeed_loop(job: Job, log: Log) -> None:
    sharding.prepare({"deepspeed": sharding.ZERO})
    import deepspeed

    rank = int(os.environ.get("RANK", "0"))
    deepspeed.init_distributed("gloo", verbose=False)
    model = tiny.llama(**job.model)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": job.zero,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    decorate(job, engine=engine)
    if job.swap:
        pretend_to_swap(engine, Path(f"{job.log}-swap{rank}"))
    start = 0
    if job.resume:
        tag = job.resume if isinstance(job.resume, str) else None
        path, client = engine.load_checkpoint(job.output_dir, tag=tag)
        start = client["step"] if path else 0
        log.write(resumed=start)
    for step in steps(job, start, log):
        rows = batch(step, rank)
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        log.write(step=step, loss=float(loss))
        if step % job.save_every == 0:
            began = time.perf_counter()
            answer = engine.save_checkpoint(
                job.output_dir, tag=job.name.format(step=step), client_state={"step": step}
            )
            log.write(saved=step, answer=answer, seconds=time.perf_counter() - began)
            if job.read:
                log.write(read=newest_step(Path(job.output_dir)))
    log.write(weights=digest(engine.module), step=job.steps)


def newest_step(directory: Path) -> int:
    """The step in the checkpoint that ``latest`` leads to."""
    file = directory / (directory / "latest").read_text() / "mp_rank_00_model_states.pt"
    step: int = torch.load(file, weights_only=False)["step"]
    return step


def pretend_to_swap(engine: Any, folder: Path) -> None:
    """The files that NVMe offload would have, which takes an aio library: its save copies them, whatever is in them."""
    folder.mkdir()
    (folder / "0.swp").write_bytes(bytes(1000))
    engine.zero_nvme_offload_optimizer = lambda: True
    engine.optimizer.optimizer_swapper = SimpleNamespace(swap_folder=str(folder))


def sharded(job: Job) -> dict[str, Any]:
    """What an Accelerator is given in order to shard; with the patches that it needs on CPU ranks."""
    if job.shard in ("deepspeed", "misled"):
        sharding.prepare({"deepspeed": {} if job.shard == "misled" else sharding.ZERO})
        from accelerate import DeepSpeedPlugin

        config = {**sharding.ZERO, "train_micro_batch_size_per_gpu": 4, "zero_optimization": job.zero}
        config = {key: value for key, value in config.items() if value != "auto" and key != "bf16"}
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    if job.shard.startswith("fsdp"):
        if job.shard == "fsdp per rank":
            sharding.write_files_of_each_rank()
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)
        PartialState._shared_state.update(
            distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu")
        )
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                state_dict_type="SHARDED_STATE_DICT",
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )
        }
    return {}


# -- accelerate -----------------------------------------------------------------------------------------------------------


class Counter:
    """An object that accelerate saves along."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerate_loop(job: Job, log: Log) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    if job.grace is not None:
        from datastates.llm import accelerate_loop as ours

        ours.GRACE_SECONDS = job.grace
    automatic = not job.name
    accelerator = Accelerator(
        cpu=not job.shard,
        project_config=ProjectConfiguration(
            job.output_dir, automatic_checkpoint_naming=automatic, total_limit=job.total_limit
        ),
        **sharded(job),
    )
    model = tiny.llama(**job.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    decorate(job, accelerator=accelerator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    with load(job, log):
        resume(job, accelerator)
    start = counter.step
    log.write(resumed=start)
    if job.counts:
        accelerator.project_configuration.iteration = start // job.save_every
    for step in steps(job, start, log):
        rows = batch(step, accelerator.process_index)
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.step = step
        log.write(step=step, loss=float(loss))
        if step % job.save_every == 0 and (accelerator.is_main_process or not job.main_only):
            began = time.perf_counter()
            where = None if automatic else os.path.join(job.output_dir, job.name.format(step=step))
            answer = accelerator.save_state(where)
            log.write(saved=step, answer=str(answer), seconds=time.perf_counter() - began)
    log.write(weights=digest(accelerator.unwrap_model(model)), step=job.steps)


@contextmanager
def load(job: Job, log: Log) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.write(refused=str(error))
        raise


def resume(job: Job, accelerator: Any) -> None:
    if isinstance(job.resume, str):
        accelerator.load_state(job.resume)
    elif job.resume and not job.name:
        if os.path.isdir(os.path.join(job.output_dir, "checkpoints")):
            accelerator.load_state()
    elif job.resume:
        # What scripts do: the newest of the directories that are there, and the one before when it cannot be loaded.
        names = [name for name in os.listdir(job.output_dir) if name.startswith(("step_", "last"))]
        for name in sorted(names, key=lambda name: int(name.partition("_")[2] or 0), reverse=True):
            try:
                accelerator.load_state(os.path.join(job.output_dir, name))
            except RuntimeError as error:
                print(error, flush=True)
            else:
                return


def main(job: Job) -> None:
    os.environ.update(job.settings)
    os.makedirs(job.output_dir, exist_ok=True)
    log = Log(f"{job.log}-rank{os.environ.get('RANK', '0')}.jsonl")
    if job.way == "accelerate":
        import accelerate.accelerator  # noqa: F401
    else:
        import deepspeed.runtime.engine  # noqa: F401
    if job.hooked is True:
        hook()
    for fault in job.faults:
        faults.install(**fault)
    {"deepspeed": deepspeed_loop, "accelerate": accelerate_loop}[job.way](job, log)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
