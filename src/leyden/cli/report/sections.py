"""The sections below the first screen. Each takes the data and returns HTML, and says so when it has nothing.

Limits keep the file small: `MAX_PAIRS` transcripts, `MAX_CHARS` per message, `MAX_MESSAGES` per transcript,
and `MAX_ROWS` rows of a table; what is left out is counted in the page.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from leyden.cli.report import svg
from leyden.cli.report.data import ConservationData, Mean, PairData, ReportData, StepData, TranscriptData

MAX_PAIRS = 12
"""Enough to read in one sitting; the store has all of them."""

MAX_MESSAGES = 24
"""Of one transcript, from its end."""

MAX_CHARS = 4000
"""Of one message."""

MAX_ROWS = 200
"""Of one table, from its end."""

STAGES = {"sft": "Supervised fine-tuning", "rl": "Reinforcement learning"}
"""Names for people."""

OUTCOMES = ("completed", "agent_error", "timeout", "overlong", "env_error", "infra_error", "cancelled")
"""Order of the stack, with the good at the bottom."""

_OUTCOME_COLOURS = {
    "completed": 3,
    "agent_error": 4,
    "timeout": 2,
    "overlong": 5,
    "env_error": 7,
    "infra_error": 6,
}

_Chart = tuple[str, str, Sequence[tuple[str, str]], float | None]

_CHARTS: Sequence[_Chart] = (
    ("Tasks solved", "share of training rollouts", (("success", "solved"),), 0.0),
    ("Loss", "of the update", (("loss", "loss"),), None),
    ("Gradient norm", "before clipping", (("grad_norm", "norm"),), 0.0),
    ("Divergence (KL)", "from the starting policy, nats per token", (("kl", "KL"),), 0.0),
    ("Entropy", "nats per token; near zero is a collapse", (("entropy", "entropy"),), 0.0),
    (
        "Sampler-trainer gap",
        "of log-probabilities; should be near zero",
        (("gap_mean", "mean"), ("gap_max", "max")),
        0.0,
    ),
    ("Completion tokens", "mean of a rollout", (("completion_tokens_mean", "tokens"),), 0.0),
    ("Groups that teach nothing", "all rewards equal", (("num_zero_variance", "groups"),), 0.0),
    ("Credit at equal success", "share; if high, smaller parts of the reward lead", (("minor_credit", "share"),), 0.0),
)
"""Title, subtitle, (field, name) of each line, and a value that the axis includes."""


def mean_cell(mean: Mean | None, *, share: bool = True) -> str:
    """A mean and its interval for a table cell; a dash for what was not measured."""
    middle, low, high = _triple(mean)
    if middle is None:
        return "&ndash;"
    show: Callable[[float | None], str] = svg.percent if share else svg.number
    if low is None or high is None:
        return show(middle)
    return f'{show(middle)} <span class="ci">{show(low)} to {show(high)}</span>'


def clip(text: str, limit: int) -> tuple[str, str]:
    """(escaped text of at most `limit` characters, a note about what was left out, or nothing)."""
    if len(text) <= limit:
        return escape(text), ""
    return escape(text[:limit]), f'<p class="small">{len(text) - limit:,} more characters left out here.</p>'


def learning(data: ReportData) -> str:
    """Curves per stage: reward with its band, then small charts, then wall time per phase."""
    steps = data.get("steps") or []
    head = "<h2>Learning</h2>"
    if not steps:
        return f'{head}<p class="why">No training step was taken in this run.</p>'
    parts = [head]
    for stage, group in groupby(steps, key=lambda step: step.get("stage", "")):
        rows = list(group)
        name = STAGES.get(stage, stage or "Training")
        plural = "step" if len(rows) == 1 else "steps"
        parts.append(
            f'<p class="why" style="margin:18px 0 0"><b>{escape(name)}</b>, {len(rows)} {plural}. '
            "Point at a mark for its numbers.</p>"
        )
        parts.append(f'<div class="charts">{_reward_chart(rows)}{_small_charts(rows)}{_seconds_chart(rows)}</div>')
    return "".join(parts)


def _column(rows: Sequence[StepData], field: str) -> list[float | None]:
    return [svg.finite(row.get(field)) for row in rows]


def _reward_chart(rows: Sequence[StepData]) -> str:
    series = svg.Series(
        name="mean reward",
        ys=_column(rows, "reward_mean"),
        lows=_column(rows, "reward_low"),
        highs=_column(rows, "reward_high"),
    )
    chart = svg.lines(_xs(rows), [series], title="Mean reward per step", width=1060, height=300)
    if not chart:
        return ""
    return (
        '<div class="card chart wide"><h3>Reward</h3>'
        f"<p>mean of the training rollouts of each step, with its interval</p>{chart}</div>"
    )


def _small_charts(rows: Sequence[StepData]) -> str:
    parts = []
    for title, subtitle, fields, floor in _CHARTS:
        series = [
            svg.Series(name=name, ys=_column(rows, field), colour=colour)
            for colour, (field, name) in enumerate(fields, start=1)
        ]
        chart = svg.lines(_xs(rows), series, title=title, floor=floor)
        if chart:
            names = svg.legend([(one.name, one.colour) for one in series]) if len(series) > 1 else ""
            parts.append(f'<div class="card chart"><h3>{title}</h3><p>{subtitle}</p>{names}{chart}</div>')
    return "".join(parts)


def _seconds_chart(rows: Sequence[StepData]) -> str:
    phases = list(dict.fromkeys(phase for row in rows for phase in row.get("seconds", {})))[:8]
    if not phases:
        return ""
    stacks = {phase: [float(row.get("seconds", {}).get(phase, 0.0)) for row in rows] for phase in phases}
    chart = svg.stacked(_xs(rows), stacks, title="Seconds per step and phase", unit="s")
    if not chart:
        return ""
    names = svg.legend([(phase, colour) for colour, phase in enumerate(phases, start=1)])
    total = sum(map(sum, stacks.values()))
    if len(phases) == 1:
        series = svg.Series(name=phases[0], ys=stacks[phases[0]])
        chart = svg.lines(_xs(rows), [series], title="Seconds per step", floor=0.0)
        what = f"{escape(phases[0])}; {total / 60:.1f} minutes in all"
        return f'<div class="card chart"><h3>Seconds per step</h3><p>{what}</p>{chart}</div>'
    return (
        '<div class="card chart wide"><h3>Where the time went</h3><p>seconds per step; '
        f"{total / 60:.1f} minutes in "
        f"all</p>{names}{chart}</div>"
    )


def _xs(rows: Sequence[StepData]) -> list[int]:
    return [int(row.get("step", position)) for position, row in enumerate(rows, start=1)]


def domains(data: ReportData) -> str:
    """Families of holdout tasks before and after, hardest first."""
    rows = data.get("domains") or []
    head = "<h2>Domains</h2>"
    if not rows:
        return f'{head}<p class="why">The holdout names no domains, or it was not evaluated.</p>'
    order = sorted(rows, key=lambda row: (_triple(row.get("after"))[0] or 0.0, row.get("domain", "")))
    lines = []
    for row in order[:MAX_ROWS]:
        before, after = row.get("before"), row.get("after")
        chart = svg.before_after(_triple(before), _triple(after), title=f"{row.get('domain', '')} before and after")
        lines.append(
            f"<tr><td>{escape(row.get('domain', '') or 'none')}</td><td>{row.get('n', 0)}</td>"
            f"<td>{mean_cell(before)}</td><td>{mean_cell(after)}</td><td>{chart}</td></tr>"
        )
    return (
        f'{head}<p class="why">Tasks solved per family of holdout tasks, hardest first. Few tasks make wide '
        "intervals: read a single line with care.</p>"
        '<div class="legend"><span><i class="swatch before"></i>before</span>'
        '<span><i class="swatch after"></i>after</span></div>'
        '<div class="card flush"><table><thead><tr><th>Domain</th><th>Tasks</th><th>Before</th><th>After</th>'
        f"<th>0 to 100 %</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"{_left_out(len(order) - MAX_ROWS, 'domains')}"
    )


def _triple(mean: Mean | None) -> tuple[float | None, float | None, float | None]:
    if mean is None:
        return None, None, None
    return svg.finite(mean["mean"]), svg.finite(mean["low"]), svg.finite(mean["high"])


def transcripts(data: ReportData) -> str:
    """The same holdout tasks before and after, side by side."""
    pairs = data.get("transcripts") or []
    head = "<h2>Before and after</h2>"
    if not pairs:
        return f'{head}<p class="why">No transcript was kept for this report.</p>'
    items = "".join(_pair(pair, position == 0) for position, pair in enumerate(pairs[:MAX_PAIRS]))
    return (
        f'{head}<p class="why">The same holdout tasks, answered by the first and the last policy version.</p>'
        f"{items}{_left_out(len(pairs) - MAX_PAIRS, 'transcripts')}"
    )


def _pair(pair: PairData, is_open: bool) -> str:
    before, after = pair.get("before"), pair.get("after")
    asked = escape(pair.get("title", "") or pair.get("task_id", ""))[:400]
    where = " &middot; ".join(escape(text) for text in (pair.get("domain", ""), pair.get("task_id", "")) if text)
    return (
        f'<details class="card"{" open" if is_open else ""}><summary><span class="asked">{asked}<br>'
        f'<span class="ci">{where}</span></span><span class="marks">{_mark(before)} &rarr; '
        f"{_mark(after)}</span>"
        f'</summary><div class="pair">{_side("Before", before)}{_side("After", after)}</div></details>'
    )


def _mark(transcript: TranscriptData | None) -> str:
    success = transcript.get("success") if transcript is not None else None
    if success is None:
        return '<span class="mark unknown">unknown</span>'
    return '<span class="mark yes">solved</span>' if success else '<span class="mark no">not solved</span>'


def _side(name: str, transcript: TranscriptData | None) -> str:
    if transcript is None:
        return f'<div class="side"><h3>{name}</h3><p class="small">No rollout.</p></div>'
    numbers = [f"reward {svg.number(transcript.get('reward'))}"]
    numbers += [f"{escape(key)} {svg.number(value)}" for key, value in (transcript.get("components") or {}).items()]
    numbers.append(escape(transcript.get("outcome", "")))
    messages = transcript.get("messages") or []
    shown = messages[-MAX_MESSAGES:]
    parts = [
        f'<div class="side"><h3>{name} {_mark(transcript)}</h3>'
        f'<p class="components">{escape(transcript.get("policy_version", ""))} &middot; '
        f"{' &middot; '.join(text for text in numbers if text)}</p>",
        _left_out(len(messages) - len(shown), "earlier messages"),
    ]
    parts += [_message(message) for message in shown]
    if transcript.get("answer"):
        text, cut = clip(transcript["answer"], MAX_CHARS)
        parts.append(f'<div class="message answer"><b>final answer</b><pre>{text}</pre>{cut}</div>')
    return "".join(parts) + "</div>"


def _message(message: Mapping[str, Any]) -> str:
    # Items of the Responses API that are no messages have a type and no role.
    role = str(message.get("role") or message.get("type") or "unknown")
    content = message.get("content") if "role" in message else dict(message)
    text = content if isinstance(content, str) else "" if content is None else _as_json(content)
    if message.get("tool_calls"):
        text = f"{text}\n{_as_json(message['tool_calls'])}".strip()
    shown, cut = clip(text or "(empty)", MAX_CHARS)
    kind = "message assistant" if role == "assistant" else "message"
    return f'<div class="{kind}"><b>{escape(role)}</b><pre>{shown}</pre>{cut}</div>'


def _as_json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def outcomes(data: ReportData) -> str:
    """How rollouts ended, per step."""
    rows = data.get("outcomes") or []
    head = "<h2>Outcomes</h2>"
    if not rows:
        return f'{head}<p class="why">No rollout was counted per step.</p>'
    parts = [
        f'{head}<p class="why">How the rollouts of each step ended. What the infrastructure broke is '
        "retried, then "
        "excluded; it never counts as a failure of the policy.</p>"
    ]
    for stage, group in groupby(rows, key=lambda row: str(row.get("stage", ""))):
        steps = list(group)
        found = {name for row in steps for name, count in row["counts"].items() if count}
        names = [name for name in OUTCOMES if name in found] + sorted(found - set(OUTCOMES))
        stacks = {name: [float(row["counts"].get(name, 0)) for row in steps] for name in names}
        colours = [_OUTCOME_COLOURS.get(name, 8) for name in names]
        xs = [int(row["step"]) for row in steps]
        chart = svg.stacked(xs, stacks, title="Outcomes", unit="rollouts", colours=colours)
        totals = [f"{name} {sum(stacks[name]):,.0f}" for name in names]
        parts.append(
            f'<div class="card chart" style="margin-top:14px"><h3>{escape(STAGES.get(stage, stage))}</h3>'
            f"{svg.legend(list(zip(totals, colours, strict=True)))}{chart}</div>"
        )
    return "".join(parts)


def conservation(data: ReportData) -> str:
    """Where every sampled token went, summed per stage, with the steps behind a fold."""
    rows = data.get("conservation") or []
    head = "<h2>Tokens</h2>"
    if not rows:
        return f'{head}<p class="why">No token was sampled for training.</p>'
    reasons = list(dict.fromkeys(reason for row in rows for reason, count in row["dropped"].items() if count))
    header = "".join(f"<th>{escape(reason.replace('_', ' '))}</th>" for reason in reasons)
    table = (
        "<table><thead><tr><th></th><th>Sampled</th><th>Trained</th>{header}<th>Unaccounted</th></tr></thead>"
        "<tbody>{body}</tbody></table>"
    )
    sums = "".join(
        _tokens_row(escape(STAGES.get(stage, stage)), list(group), reasons)
        for stage, group in groupby(rows, key=lambda row: row["stage"])
    )
    shown = rows[-MAX_ROWS:]
    steps = "".join(_tokens_row(f"{escape(row['stage'])} {row['step']}", [row], reasons) for row in shown)
    total = _tokens_row("All", rows, reasons, "total")
    return (
        f'{head}<p class="why">Every sampled token is trained once or dropped for a named reason: '
        "sampled = trained + "
        'dropped, so the last column is zero.</p><div class="card flush">'
        f'{table.format(header=header, body=sums + total)}</div><details class="card"><summary>Per '
        "step</summary>"
        f'<div style="overflow-x:auto">{table.format(header=header, body=steps)}</div>'
        f"{_left_out(len(rows) - len(shown), 'earlier steps')}</details>"
    )


def _tokens_row(name: str, rows: Sequence[ConservationData], reasons: Sequence[str], kind: str = "") -> str:
    sampled, trained = sum(row["sampled"] for row in rows), sum(row["trained"] for row in rows)
    dropped = [sum(row["dropped"].get(reason, 0) for row in rows) for reason in reasons]
    rest = sampled - trained - sum(sum(row["dropped"].values()) for row in rows)
    share = f' <span class="ci">{trained / sampled * 100:.1f} %</span>' if sampled else ""
    cells = "".join(f"<td>{count:,}</td>" for count in dropped)
    odd = f'<span class="mark no">{rest:,}</span>' if rest else "0"
    first = f"<td>{name}</td><td>{sampled:,}</td><td>{trained:,}{share}</td>"
    return f'<tr class="{kind}">{first}{cells}<td>{odd}</td></tr>'


def diagnostics(data: ReportData) -> str:
    """Plain sentences about what to know or to do."""
    notes = data.get("diagnostics") or []
    if not notes:
        return '<h2>Diagnostics</h2><p class="why">Nothing to report.</p>'
    items = "".join(f"<li>{clip(note, MAX_CHARS)[0]}</li>" for note in notes[:MAX_ROWS])
    return (
        f'<h2>Diagnostics</h2><div class="card" style="margin-top:14px"><ul class="notes">{items}</ul></div>'
        f"{_left_out(len(notes) - MAX_ROWS, 'notes')}"
    )


def _left_out(count: int, what: str) -> str:
    return f'<p class="small">{count:,} {what} left out of this page.</p>' if count > 0 else ""
