"""The transcripts in README.md: fenced ``console`` blocks, as commands with what they should print.

A line that begins with ``$ `` is a command; the lines below it are its output. An output line of just ``...`` stands for any
number of lines, and ``...`` within a line for anything. A number in the README stands for any number, and the lines of a table
for a table of any width. ``text`` blocks look the same but take too long to be run for the README alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_LINES = r"(?:[^\n]*\n)*?"
_RULES = (  # what may differ between two runs, and what stands for it
    (re.compile(r"([━─┃│┏┓┗┛┡┩└┘┳┴╇┼┬┤├ ])\1+"), r"\1"),
    (re.compile(r"\b[0-9a-f]{6,}\b|\d+(?:[.:,]\d+)*"), "0"),
    (re.compile(r"0 (?:ms|s|min|h)\b"), "0 s"),
    (re.compile(r"0 (?:B|KiB|MiB|GiB)\b"), "0 B"),
)


@dataclass(frozen=True)
class Step:
    """One command and the output that the README shows for it; empty when it shows none."""

    command: str
    expected: str


def transcripts(text: str) -> list[list[Step]]:
    """One list of steps for each block, in the order of the page."""
    return [_steps(block) for block in _BLOCK.findall(text)]


def shown_in(text: str, command: str) -> str:
    """What a fenced ``text`` block shows as the output of `command`, which its first line names."""
    return text.split(f"```text\n$ {command}\n")[1].split("```")[0]


def _steps(block: str) -> list[Step]:
    commands = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [Step(*command.split("\n", 1)) for command in commands]


def agrees(expected: str, actual: str) -> bool:
    """Whether `actual` is what the README shows, up to numbers, units and the widths of tables."""
    pattern = "".join(_ANY_LINES if line == "..." else _one_line(line) for line in _plain(expected))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _plain(actual))) is not None


def _one_line(shown: str) -> str:
    return "[^\n]*".join(re.escape(part) for part in shown.split("...")) + "\n"


def _plain(text: str) -> list[str]:
    return [_level(line) for line in text.splitlines() if line.strip()]


def _level(line: str) -> str:
    for pattern, stand_in in _RULES:
        line = pattern.sub(stand_in, line)
    return line.strip()
