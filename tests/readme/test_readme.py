"""What README.md says is so: its commands run and print what it shows, its table of settings is the table of settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from datastates import settings
from transcripts import README, agrees, transcripts

TEXT = README.read_text()


def test_the_commands_of_the_readme_run_and_print_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(README.parent / "templates")
    for step in (step for block in transcripts(TEXT) for step in block):
        result = _shell(step.command, tmp_path)
        assert result.returncode == 0, result.stdout
        assert agrees(step.expected, result.stdout), f"$ {step.command}\n{result.stdout}"


def _shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` as a person would in a terminal of 100 columns; both streams as they would be seen there."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "100"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def test_the_table_of_settings_is_the_one_in_the_code() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `") and "`CKPT_RUN_" in line]
    assert rows == [_row(setting) for setting in settings.TABLE]


def _row(setting: settings.Setting) -> str:
    default = "" if setting.default is None else f"`{setting.default}`"
    return f"| `{setting.key}` | `{setting.variable}` | {default} | {setting.unit} | {setting.meaning} |"


def test_every_path_that_the_readme_links_to_exists() -> None:
    links = [part.split(")")[0] for part in TEXT.split("](")[1:]]
    assert links
    assert [link for link in links if not link.startswith("#") and not (README.parent / link).exists()] == []


def test_no_line_number_of_a_source_is_shown_since_it_would_be_wrong_soon() -> None:
    assert re.findall(r"\.py:\d+", TEXT) == []


def test_every_test_that_the_readme_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT)
    assert named
    tests = README.parent / "tests"
    for file, name in named:
        path = README.parent / file if file.startswith("tests/") else tests / "train" / file
        assert f"\ndef {name}(" in path.read_text(), f"{file}::{name}"


def test_numbers_and_widths_may_differ_but_words_may_not() -> None:
    shown = "step 12 loss 3.4\n...\n│ stall   │ 4.1 ms │\n"
    assert agrees(shown, "step 7 loss 10.25\nany\nother line\n│ stall │ 0.9 ms │\n")
    assert not agrees(shown, "step 7 loss 10.25\n│ stall │ nothing │\n")
