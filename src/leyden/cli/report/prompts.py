"""The section about prompts: the difference first, then the rounds of the search, then each text as a whole."""

from collections.abc import Mapping
from html import escape
from typing import Any

from leyden.cli.report import svg
from leyden.cli.report.data import PromptsData
from leyden.cli.report.sections import MAX_CHARS, MAX_ROWS, clip

MAX_DIFF_CHARS = 20_000
"""Of the difference; the file in the run folder has all of it."""

_COLUMNS = (
    ("score", "Best score"),
    ("num_versions", "Prompts tried"),
    ("num_rollouts", "Rollouts"),
    ("num_reflections", "Replies"),
    ("reflection_tokens", "Their tokens"),
    ("reflection_usd", "Their cost, USD"),
    ("num_garbage", "Of no use"),
)
"""Field of a round, and its heading."""


def section(data: PromptsData) -> str:
    """The section as HTML."""
    return (
        "<h2>Prompts</h2>"
        '<p class="why">The harness was not changed: the gateway puts these texts in place of its own.</p>'
        f"{_difference(data)}{_rounds(data)}{_texts(data)}"
    )


def _difference(data: PromptsData) -> str:
    diff = data.get("diff", "")
    if not diff:
        return '<p class="why">No other prompts did better on the validation tasks than those of the harness.</p>'
    text, cut = clip(diff, MAX_DIFF_CHARS)
    lines = "\n".join(_line(line) for line in text.split("\n"))
    heading = escape(data.get("version", ""))
    return f'<div class="card"><h3>Difference {heading}</h3><pre class="diff">{lines}</pre>{cut}</div>'


def _line(line: str) -> str:
    """One escaped line of the difference, marked as added or removed."""
    if line.startswith(("+", "-")) and not line.startswith(("+++", "---")):
        return f"<{'ins' if line[0] == '+' else 'del'}>{line}</{'ins' if line[0] == '+' else 'del'}>"
    return line


def _rounds(data: PromptsData) -> str:
    rounds = list(data.get("rounds") or ())[-MAX_ROWS:]
    if not rounds:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for _, name in _COLUMNS)
    rows = "".join(f"<tr><td>{row.get('step', '')}</td>{_cells(row)}</tr>" for row in rounds)
    return (
        f'<div class="card flush" style="margin-top:14px"><table><thead><tr><th>Round</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cells(row: Mapping[str, Any]) -> str:
    return "".join(f"<td>{svg.number(svg.finite(row.get(field)))}</td>" for field, _ in _COLUMNS)


def _texts(data: PromptsData) -> str:
    parts = []
    for slot in data.get("slots") or ():
        (before, cut_before), (after, cut_after) = clip(slot["before"], MAX_CHARS), clip(slot["after"], MAX_CHARS)
        same = "" if slot["before"] != slot["after"] else " (unchanged)"
        parts.append(
            f'<details class="card"><summary>{escape(slot["name"])}, {escape(slot["where"])}{same}</summary>'
            f'<h3>The harness sends</h3><pre class="config">{before}</pre>{cut_before}'
            f'<h3>The model reads</h3><pre class="config">{after}</pre>{cut_after}</details>'
        )
    return "".join(parts)
