"""The page of `leyden compare`: which version to take, how sure that is, and what it costs.

Promises: as `page`: one self-contained HTML text without scripts or outside addresses, everything from data escaped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from leyden.base import stats
from leyden.cli.report import svg
from leyden.cli.report.page import frame
from leyden.cli.report.scatter import Point, scatter
from leyden.release.fronts import Ratio
from leyden.release.gate import Comparison
from leyden.release.side_by_side import Pair, Row, SideBySide

AXIS_NAMES = {
    "tokens": ("Tokens", "tokens of a rollout, read and sampled"),
    "latency_s": ("Latency", "seconds of a rollout"),
    "usd": ("Money", "USD of 1,000 rollouts"),
}
"""Title of a chart and words under its axis."""

SCALE = {"tokens": 1.0, "latency_s": 1.0, "usd": 1000.0}
"""Factor from a rollout to what is shown: money of one rollout is too small to read."""

TERMS: Mapping[str, str] = {
    "Version": "One fixed state of a policy: its weights, its prompts or both.",
    "Reference": "The version named first: what is in use, or the untrained model. Gains are against it.",
    "pass@1": "The chance that one rollout solves a task, averaged over tasks.",
    "Interval": "A range that would hold the true value in most repetitions with new tasks.",
    "Not separable": "The difference is too small for this many tasks; it may be chance. It does not mean equal.",
    "Adjusted p": "The p-value after Holm's correction for all pairs on this page.",
    "Pareto front": "Versions that no other beats in quality without costing more.",
    "On the front": "Share of resamples of the tasks in which a version is on the front: how sure its place is.",
    "Cost per added success": "Training and additional running cost, divided by the tasks solved more than with the "
    "reference. Without an upper end where some resamples add no success at all.",
}
"""Said at the end of the page."""


def render_comparison(
    found: SideBySide, *, title: str, looks: str = "", facts: Mapping[str, object] | None = None
) -> str:
    """The page as HTML."""
    parts = [
        ("result", "Result", _first_screen(found, looks)),
        ("fronts", "Quality and cost", _fronts(found)),
        ("pairs", "Pairs", _pairs(found)),
        ("costs", "Costs", _costs(found)),
        ("notes", "What to know", _notes(found)),
        ("run", "What was compared", _facts(facts or {})),
        ("glossary", "Glossary", _glossary()),
    ]
    subtitle = f"{len(found.rows)} versions on {found.num_tasks} holdout tasks"
    return frame(title, subtitle, [part for part in parts if part[2]])


def _first_screen(found: SideBySide, looks: str) -> str:
    nothing = found.recommended == found.rows[0].name
    tone, badge = ("even", "keep the reference") if nothing else ("better", "recommended")
    level = f"{100 * found.level:.4g} %"
    verdict = (
        f'<div class="card verdict {tone}"><span class="badge">{badge}</span>'
        f'<p class="big" style="font-size:36px">{escape(found.recommended)}</p>'
        f'<p class="sentence">{escape(found.reason)}</p>'
        '<div class="small"><p>The chance that any answer on this page is false is at most '
        f"{100 * found.alpha:.3g} %.</p>"
        f"<p>{escape(looks)}</p></div></div>"
    )
    items = [
        svg.Bar(
            label=row.name, note=row.policy_version, mean=svg.finite(row.pass1.mean), low=svg.finite(row.pass1.low),
            high=svg.finite(row.pass1.high),
        )
        for row in found.rows
    ]  # fmt: skip
    strong = [row.name for row in found.rows].index(found.recommended)
    chart = svg.bars(items, title="Share of holdout tasks solved, with intervals", strong=strong)
    return (
        f'<div class="hero">{verdict}<div class="card chart"><h3>Holdout tasks solved</h3>'
        f"<p>pass@1 with {level} intervals</p>{chart}</div></div>"
    )


def _fronts(found: SideBySide) -> str:
    cards = []
    for front in found.fronts:
        name, unit = AXIS_NAMES[front.axis]
        costs = [_scaled(row, front.axis) for row in found.rows]
        points = [
            Point(
                label=row.name,
                x=svg.finite(cost.mean),
                x_low=svg.finite(cost.low),
                x_high=svg.finite(cost.high),
                y=svg.finite(row.pass1.mean),
                y_low=svg.finite(row.pass1.low),
                y_high=svg.finite(row.pass1.high),
                colour=number % 8 + 1,
                on_front=on_front,
                tip=f"{row.name}: {_plain(row.pass1, percent=True)} solved, {_plain(cost)} {unit}, "
                f"on the front in {100 * share:.0f} % of resamples",
            )
            for number, (row, cost, on_front, share) in enumerate(
                zip(found.rows, costs, front.on_front, front.membership, strict=True)
            )
        ]
        chart = scatter(points, title=f"Share solved against {unit}", x_unit=unit)
        cards.append(f'<div class="card chart"><h3>{name}</h3><p>up and to the left is better</p>{chart}</div>')
    if not cards:
        return (
            '<h2>Quality and cost</h2><div class="card"><p class="small">No cost is known for every version.</p></div>'
        )
    why = (
        "Crosses are intervals over tasks. Full points are on the Pareto front, rings are not; the table says in how "
        "many resamples of the tasks each is."
    )
    head = "".join(f"<th>{AXIS_NAMES[front.axis][0]}</th>" for front in found.fronts)
    rows = "".join(
        f"<tr><td><b>{escape(row.name)}</b></td>"
        + "".join(f"<td>{100 * front.membership[number]:.0f} %</td>" for front in found.fronts)
        + "</tr>"
        for number, row in enumerate(found.rows)
    )
    table = (
        '<div class="card flush" style="margin-top:16px"><table><thead><tr><th>On the front with</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return f'<h2>Quality and cost</h2><p class="why">{why}</p><div class="charts">{"".join(cards)}</div>{table}'


def _pairs(found: SideBySide) -> str:
    rows = "".join(_pair(pair) for pair in found.pairs)
    why = "Every version against every one named before it. Answers are corrected for all pairs (Holm)."
    return (
        f'<h2>Pairs</h2><p class="why">{why}</p><div class="card flush"><table><thead><tr><th>Pair</th>'
        "<th>Difference, points</th><th>Won</th><th>Lost</th><th>p</th><th>Adjusted p</th><th>Answer</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _pair(pair: Pair) -> str:
    verdict: Comparison = pair.verdict
    low, high = svg.finite(verdict.low), svg.finite(verdict.high)
    ends = "" if low is None or high is None else f' <span class="ci">{100 * low:+.1f} to {100 * high:+.1f}</span>'
    mark = {"better": "yes", "worse": "no"}.get(verdict.answer, "unknown")
    return (
        f"<tr><td><b>{escape(pair.first)}</b> against {escape(pair.second)}</td>"
        f"<td>{100 * verdict.difference:+.1f}{ends}</td><td>{verdict.num_won}</td><td>{verdict.num_lost}</td>"
        f"<td>{svg.number(verdict.p_value)}</td><td>{svg.number(pair.adjusted_p)}</td>"
        f'<td><span class="mark {mark}">{verdict.answer}</span></td></tr>'
    )


def _costs(found: SideBySide) -> str:
    month = found.tasks_per_month is not None
    first = ["Version", "pass@1", "Tokens", "Latency, s", "USD of 1,000", "Training, minutes", "Training, USD"]
    second = ["Against " + found.rows[0].name, "Added, points", f"Cost per added success, {found.unit}"]
    second += ["Month, USD", "Month, tokens", "Month, solved more"] if month else []
    work = f"{found.horizon_tasks:,.0f} tasks" + (" (a month of the workload)" if month else "")
    return (
        '<h2>Costs</h2><p class="why">Of a rollout, with intervals over tasks; and what making the version took.</p>'
        + _table(first, [_cost_cells(row) for row in found.rows], found)
        + '<p class="why" style="margin-top:18px">What an added success costs: training and more running cost over '
        + escape(f"{work}, divided by the tasks solved more.")
        + "</p>"
        + _table(second, [_gain_cells(row, month) for row in found.rows], found)
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], found: SideBySide) -> str:
    body = ""
    for row, cells in zip(found.rows, rows, strict=True):
        chosen = ' class="chosen"' if row.name == found.recommended else ""
        body += f"<tr{chosen}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="card flush"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _cost_cells(row: Row) -> list[str]:
    return [
        f"<b>{escape(row.name)}</b>",
        _cell(row.pass1, percent=True),
        *(_cell(_scaled(row, axis)) for axis in AXIS_NAMES),
        svg.number(row.training.minutes),
        svg.number(row.training.usd),
    ]


def _gain_cells(row: Row, month: bool) -> list[str]:
    added = None if row.added is None else _times(row.added, 100)
    cells = [f"<b>{escape(row.name)}</b>", _cell(added), _ratio(row.per_success)]
    if month:
        cells += [_cell(row.monthly_usd), _whole(row.monthly_tokens), _cell(row.monthly_added)]
    return cells


def _whole(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:,.0f}"


def _scaled(row: Row, axis: str) -> stats.Interval:
    return _times(row.axes[axis], SCALE[axis])


def _times(interval: stats.Interval, factor: float) -> stats.Interval:
    return replace(interval, mean=interval.mean * factor, low=interval.low * factor, high=interval.high * factor)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None or ratio.value is None:
        return "&ndash;"
    ends = f"{svg.number(ratio.low)} to {'no bound' if ratio.high is None else svg.number(ratio.high)}"
    return f'{svg.number(ratio.value)}<br><span class="ci">{ends}</span>'


def _cell(interval: stats.Interval | None, *, percent: bool = False) -> str:
    if interval is None or not interval.num_tasks or math.isnan(interval.mean):
        return "&ndash;"
    show = svg.percent if percent else svg.number
    low, high = svg.finite(interval.low), svg.finite(interval.high)
    ends = "" if low is None or high is None else f'<br><span class="ci">{show(low)} to {show(high)}</span>'
    return f"{show(interval.mean)}{ends}"


def _plain(interval: stats.Interval, *, percent: bool = False) -> str:
    show = svg.percent if percent else svg.number
    mean, low, high = (show(svg.finite(value)) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} ({low} to {high})".replace("&ndash;", "-")


def _notes(found: SideBySide) -> str:
    if not found.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    return f'<h2>What to know</h2><div class="card" style="margin-top:14px"><ul class="notes">{items}</ul></div>'


def _facts(facts: Mapping[str, object]) -> str:
    if not facts:
        return ""
    items: Sequence[str] = [f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items()]
    inner = f'<dl class="facts">{"".join(items)}</dl>'
    return f'<h2>What was compared</h2><div class="card" style="margin-top:14px">{inner}</div>'


def _glossary() -> str:
    terms = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in TERMS.items())
    return f'<h2>Glossary</h2><div class="card" style="margin-top:14px"><dl class="glossary">{terms}</dl></div>'
