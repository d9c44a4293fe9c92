"""Log lines: each once on a terminal, whatever the script does with logging, and always in its log files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import processes
import pytest
from processes import Job

LINES = """
from datastates.llm import log
logger = log.logger("datastates.llm.decorator")
{set_up}
logger.info("the line")
logger.error("the error")
"""
OURS = "[INFO] [<string>:5:<module>] the line"

SET_UPS = {
    "nothing": "",
    "basicConfig": "import logging; logging.basicConfig()",
    "to stdout": "import logging, sys; logging.basicConfig(stream=sys.stdout)",
    "a handler for errors": "import logging; logging.basicConfig(); logging.getLogger().handlers[0].setLevel('ERROR')",
    "a root logger for errors": "import logging; logging.basicConfig(level=logging.ERROR)",
    "a filter that drops it": (
        "import logging; logging.basicConfig();"
        " logging.getLogger().handlers[0].addFilter(lambda record: 'line' not in record.msg)"
    ),
    "a file": "import logging; logging.basicConfig(filename='log.txt')",
    "a file and a terminal": (
        "import logging; logging.basicConfig(handlers=[logging.StreamHandler(), logging.FileHandler('log.txt')])"
    ),
    "not passed on": "import logging; logging.basicConfig(); logging.getLogger('datastates').propagate = False",
    "memory": "import io, logging; logging.basicConfig(stream=io.StringIO())",
    "a stderr of its own": "import io, logging, sys; logging.basicConfig(); sys.stderr = io.StringIO()",
}


@pytest.mark.parametrize("set_up", SET_UPS.values(), ids=list(SET_UPS))
def test_each_line_is_on_the_terminal_once_however_logging_is_set_up(set_up: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LINES.format(set_up=set_up)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    assert done.stdout.count("the line") == 1, done.stdout
    if "log.txt" in set_up:
        assert (tmp_path / "log.txt").read_text().count("the line") == 1


def test_logging_that_is_set_up_between_two_lines_counts_from_then_on() -> None:
    code = LINES.format(set_up="") + LINES.format(set_up="import logging; logging.basicConfig()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.count("the line") for line in done.stderr.splitlines()] == [1, 0, 1, 0]
    assert OURS in done.stderr
    assert "INFO:datastates.llm.decorator:the line" in done.stderr


def test_a_training_that_logs_to_terminal_and_file_has_each_line_once_in_both(tmp_path: Path) -> None:
    script = processes.train_after(
        tmp_path,
        "import logging\n"
        "logging.basicConfig(handlers=[logging.StreamHandler(), logging.FileHandler('log.txt')], level='INFO')",
    )
    job = Job(str(tmp_path / "out"), str(tmp_path / "log"), resume=False, orderly=True)
    process = processes.launch(
        [sys.executable, str(script), json.dumps(asdict(job))], tmp_path / "out.txt", cwd=tmp_path
    )
    assert process.wait(processes.PATIENCE) == 0, (tmp_path / "out.txt").read_text()[-5000:]
    for file in ("out.txt", "log.txt"):
        text = (tmp_path / file).read_text()
        assert [text.count(f"checkpoint-{step} is committed") for step in (2, 4, 6, 8)] == [1, 1, 1, 1], file
