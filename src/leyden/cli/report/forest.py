"""A forest for people: plain data with bounded texts, and that data as a section of the report.

The same data is drawn in the terminal by `leyden inspect --forest` and printed by its `--json`.
"""

from collections.abc import Sequence
from html import escape

from leyden.base.records import IntArray, Trace
from leyden.traces.assemble import Action
from leyden.traces.divergence import Decode
from leyden.traces.picture import Branch, Picture, picture

MAX_INDENT = 24
"""Levels that are indented; deeper ones stand where this one does."""


def forest_data(
    title: str, traces: Sequence[Trace], actions: Sequence[Action], decode: Decode | None, *, with_ids: bool = False
) -> Picture:
    """The picture of `traces` with texts by `decode`, or with ids where there is none or `with_ids` asks for them."""

    def text(ids: IntArray) -> str:
        numbers = " ".join(map(str, ids.tolist()))
        if decode is None:
            return numbers
        return f"{decode(ids.tolist())!r} [{numbers}]" if with_ids else repr(decode(ids.tolist()))

    return picture(traces, actions, text=text, title=title, decode=decode)


def summary_lines(data: Picture) -> list[str]:
    """What the forest adds up to, as sentences."""
    ratio = data["num_tokens"] / max(1, data["num_unique"])
    lines = [
        f"{data['num_answers']} answers on {data['num_trajectories']} trajectories: {data['num_tokens']:,} tokens, of "
        f"which {data['num_unique']:,} are distinct ({ratio:.2f} times fewer); {data['num_sampled']:,} were sampled, "
        f"{data['num_trained']:,} are trained."
    ]
    kinds = data["kinds"]
    if kinds:
        how = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())
        lines.append(f"Later calls against earlier ones of their attempt: {how}.")
    if data["num_unknown"]:
        lines.append(f"{data['num_unknown']} calls have no known tokens and are not shown.")
    return lines


def branch_line(branch: Branch) -> str:
    """Counts of one branch in words."""
    shared = f", shared by {branch['num_rows']} answers" if branch["num_rows"] > 1 else ""
    parts = [f"{branch['num_tokens']:,} tokens from {branch['depth']:,}{shared}"]
    if branch["num_sampled"]:
        parts.append(f"{branch['num_sampled']:,} sampled, {branch['num_trained']:,} trained")
    if branch["num_ends"]:
        more = branch["num_ends"] - len(branch["ends"])
        names = ", ".join(branch["ends"]) + (f" and {more} more" if more else "")
        parts.append(f"{'call' if branch['num_ends'] == 1 else 'calls'} {names}")
    return "; ".join(parts)


def forest(data: Picture | None) -> str:
    """One group as a forest: who shares what, where calls diverged."""
    head = "<h2>Shared prefixes of one group</h2>"
    if data is None or not data["branches"]:
        return f'{head}<p class="why">No group of this run has calls with known tokens.</p>'
    lines = "".join(f"<p>{escape(line)}</p>" for line in summary_lines(data))
    rows = "".join(_row(branch, data["num_unique"]) for branch in data["branches"])
    left = data["num_left_out"]
    more = f'<p class="small">{left:,} branches left out of this page.</p>' if left else ""
    return (
        f'{head}<p class="why">{escape(data["title"])}. Each line is a run of tokens that is computed once; lines '
        "further to the right continue the one above them. Calls are named attempt.call.</p>"
        f'<div class="card">{lines}<div class="forest">{rows}</div>{more}</div>'
    )


def _row(branch: Branch, num_unique: int) -> str:
    indent = min(branch["level"], MAX_INDENT)
    share = 100 * branch["num_tokens"] / max(1, num_unique)
    notes = "".join(
        f'<div class="diverged"><b>{escape(one["kind"].replace("_", " "))}</b> at {one["position"]:,}: '
        f"<code>{escape(one['earlier'])}</code> became <code>{escape(one['later'])}</code></div>"
        for one in branch["diverged"]
    )
    hidden = branch["num_diverged"] - len(branch["diverged"])
    notes += f'<div class="small">{hidden} more divergences here.</div>' if hidden else ""
    return (
        f'<div class="branch" style="margin-left:{indent * 14}px"><i class="bar" style="width:{share:.1f}%"></i>'
        f"<span>{escape(branch_line(branch))}</span> <code>{escape(branch['text'])}</code>{notes}</div>"
    )
