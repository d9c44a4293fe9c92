"""What a user copies from templates/ runs, with no more changed than where the model and the texts lie, and how long it trains.

Two CPU ranks stand for the GPUs (see ``cpu_ranks.py``).
"""

from __future__ import annotations

import ast
import re

import checkpoints
import processes
import pytest
import runs
from desk import NEEDS_DEEPSPEED, NEEDS_FSDP, TEMPLATES, Desk, fsdp_environment, succeed
from waiting import until

SCRIPTS = ("spot_train.py", "on_demand_train.py", "on_demand_resume.py")
SHORT = ("--save_steps=2", "--eval_steps=3")
SHARDED = {
    "ds_config_zero2.json": "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "ds_config_zero3.json": "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "ds_config_zero3_offload.json": "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "fsdp_config.yaml": "pytorch_model_fsdp_0/__1_0.distcp",
}
"""A file of rank 1's by which it is known that the state was sharded."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


def start(
    desk: Desk,
    script: str,
    out: str,
    steps: int,
    *words: str,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
) -> processes.Training:
    given = ["--model_path=model", "--data_path=texts", f"--output_dir={out}", f"--max_steps={steps}"]
    return desk.train(
        [str(TEMPLATES / script), *given, *SHORT, *words],
        desk.path / f"{out}.log",
        ranks,
        **(environment or {}),
    )


def test_the_spot_script_carries_on_when_it_is_started_again(desk: Desk) -> None:
    output_dir = desk.path / "spot"
    training = start(desk, "spot_train.py", "spot", 200)
    try:
        until(lambda: runs.committed(output_dir), "a commit", seen=training.text)
    finally:
        training.kill()
    newest = checkpoints.whole(output_dir)[-1]
    text = succeed(start(desk, "spot_train.py", "spot", newest + 4))
    assert f"resuming at step {newest} " in text
    assert checkpoints.whole(output_dir)[-1] == newest + 4


def test_on_demand_starts_over_and_its_second_half_carries_on(desk: Desk) -> None:
    output_dir = desk.path / "demand"
    for _ in range(2):
        assert "resuming at step" not in succeed(start(desk, "on_demand_train.py", "demand", 4))
    assert "resuming at step 4 " in succeed(start(desk, "on_demand_resume.py", "demand", 8))
    assert checkpoints.whole(output_dir) == [4, 6, 8], "save_total_limit is 3"


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(name, marks=NEEDS_FSDP if name.endswith(".yaml") else NEEDS_DEEPSPEED) for name in SHARDED],
)
def test_each_configuration_shards_over_two_ranks_and_carries_on(configuration: str, desk: Desk) -> None:
    out = configuration.partition(".")[0]
    words: tuple[str, ...] = ("--deepspeed", str(TEMPLATES / configuration))
    environment = {}
    if configuration.endswith(".yaml"):
        words, environment = (), fsdp_environment()
    succeed(start(desk, "on_demand_train.py", out, 2, *words, ranks=2, environment=environment))
    text = succeed(start(desk, "on_demand_resume.py", out, 4, *words, ranks=2, environment=environment))
    assert "resuming at step 2 " in text
    assert checkpoints.whole(desk.path / out) == [2, 4]
    assert SHARDED[configuration] in checkpoints.tree(runs.checkpoint(desk.path / out, 4))


def test_the_three_scripts_differ_in_what_they_say_and_in_how_they_resume() -> None:
    bodies, resumes = set(), []
    for script in SCRIPTS:
        text = (TEMPLATES / script).read_text()
        docstring = ast.get_docstring(ast.parse(text), clean=False)
        rest = text.replace(f'"""{docstring}"""', "").replace(
            "import os\n", ""
        )  # the spot script asks a variable
        resumes += re.findall(r"^    trainer\.train\(.*$", rest, re.MULTILINE)
        bodies.add(rest.replace(resumes[-1], ""))
    assert len(bodies) == 1
    assert [line.partition("=")[2] for line in resumes] == [
        'os.getenv("CKPT_LAST_STEP") is not None)',
        "False)",
        "True)",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_decorated_in_the_platforms_four_lines(script: str) -> None:
    text = (TEMPLATES / script).read_text()
    assert "from datastates.llm import DecoratedCheckpointing\n" in text
    assert "    DecoratedCheckpointing(runtime_config=config, rank=args.local_rank)\n" in text
    for key in (
        '"host_cache_size": 50,',
        '"parser_threads": 1,',
        '"pin_host_cache": True,',
        '"trainer": trainer,',
    ):
        assert key in text
