"""The page: order of the sections, the first screen, what was run. `render` is the only way in.

Promises: one self-contained HTML text without scripts or outside addresses; everything that comes from data
is escaped; the size is bounded whatever the run (see the limits in `sections` and `svg`).
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, get_type_hints

from leyden.base.errors import RecordError
from leyden.cli.report import forest, prompts, sections, svg
from leyden.cli.report.data import EvaluationData, ReportData
from leyden.cli.report.glossary import TERMS

_TONES = {"better": "better", "worse": "worse", "not separable": "even"}


def render(data: ReportData) -> str:
    """The report as HTML. Raises RecordError for a key that no report has."""
    unknown = sorted(set(data) - set(get_type_hints(ReportData)))
    if unknown:
        raise RecordError(f"report data has unknown keys {unknown}; the keys are those of ReportData")
    parts = [
        ("result", "Result", _first_screen(data)),
        ("run", "What was run", _what_was_run(data)),
        ("learning", "Learning", sections.learning(data)),
        *([("prompts", "Prompts", prompts.section(data["prompts"]))] if "prompts" in data else []),
        ("domains", "Domains", sections.domains(data)),
        ("transcripts", "Before and after", sections.transcripts(data)),
        ("outcomes", "Outcomes", sections.outcomes(data)),
        ("tokens", "Tokens", sections.conservation(data)),
        ("forest", "Forest", forest.forest(data.get("forest"))),
        ("diagnostics", "Diagnostics", sections.diagnostics(data)),
        ("glossary", "Glossary", _glossary()),
    ]
    return frame(data.get("title", "Run report"), data.get("subtitle", ""), parts)


def frame(title: str, subtitle: str, parts: Sequence[tuple[str, str, str]]) -> str:
    """A whole page of sections: (anchor, name in the navigation, HTML) each. Title and subtitle are escaped here."""
    links = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in parts)
    body = "".join(f'<section id="{anchor}">{content}</section>' for anchor, _, content in parts)
    title = escape(title)
    subtitle = f'<p class="lead">{escape(subtitle)}</p>' if subtitle else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">"
        f"<title>{title}</title><style>{_style_sheet()}</style></head><body>"
        f"<header><h1>{title}</h1>{subtitle}</header><nav><div>{links}</div></nav><main>{body}"
        "<footer>Written by Leyden. This file needs no network and no other "
        "file.</footer></main></body></html>\n"
    )


def _style_sheet() -> str:
    return resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def _first_screen(data: ReportData) -> str:
    evaluations = data.get("evaluations") or []
    return f'<div class="hero">{_verdict(data)}{_result_chart(data)}</div>{_result_table(evaluations)}'


def _verdict(data: ReportData) -> str:
    verdict = data.get("verdict")
    looks = f"<p>{escape(data['looks'])}</p>" if data.get("looks") else ""
    sentence = f'<p class="sentence">{escape(data["sentence"])}</p>' if data.get("sentence") else ""
    if verdict is None:
        nothing = '<p class="sentence">Nothing was compared on a holdout in this run.</p>'
        return (
            '<div class="card verdict none"><span class="badge">no verdict</span>'
            f'{sentence or nothing}<div class="small">{looks}</div></div>'
        )
    answer = str(verdict.get("answer", ""))
    versions = " against ".join(escape(str(verdict.get(name, ""))) for name in ("candidate", "incumbent"))
    count = svg.number(svg.finite(verdict.get("num_tasks")))
    return (
        f'<div class="card verdict {_TONES.get(answer, "none")}"><span class="badge">{escape(answer)}</span>'
        f"{_headline(verdict)}{sentence}"
        f'<div class="small"><p>{versions} on {count} holdout tasks; '
        f" {escape(str(verdict.get('test', '')))}.</p>{looks}</div></div>"
    )


def _headline(verdict: Mapping[str, Any]) -> str:
    difference, low, high = (svg.finite(verdict.get(name)) for name in ("difference", "low", "high"))
    if difference is None:
        return ""
    points = verdict.get("metric", "success") == "success"
    scale, unit, digits = (100, "points", 1) if points else (1, "reward", 3)
    level = svg.finite(verdict.get("level")) or 0.95
    ends = (
        f"{level * 100:g} % interval {low * scale:+.{digits}f} to {high * scale:+.{digits}f}"
        if low is not None and high is not None
        else "no interval"
    )
    big = f"{difference * scale:+.{digits}f} <small>{unit}</small>"
    return f'<p class="big">{big}</p><p class="interval">{ends}</p>'


def _result_chart(data: ReportData) -> str:
    evaluations = data.get("evaluations") or []
    level = data.get("level", 0.95)
    if not evaluations:
        nothing = '<p class="small">No evaluation was made.</p>'
        return f'<div class="card"><h3>Holdout tasks solved</h3>{nothing}</div>'
    items = []
    for one in evaluations:
        pass1 = one.get("pass1") or {"mean": None, "low": None, "high": None}
        items.append(
            svg.Bar(
                label=one.get("label", ""),
                note=one.get("policy_version", ""),
                mean=svg.finite(pass1["mean"]),
                low=svg.finite(pass1["low"]),
                high=svg.finite(pass1["high"]),
            )
        )
    chart = svg.bars(items, title="Share of holdout tasks solved, with intervals")
    return (
        '<div class="card chart"><h3>Holdout tasks solved</h3>'
        f"<p>pass@1 with {level * 100:g} % intervals; tasks never trained on</p>{chart}</div>"
    )


def _result_table(evaluations: Sequence[EvaluationData]) -> str:
    if not evaluations:
        return ""
    rows = []
    for one in evaluations:
        excluded = one.get("num_excluded", 0)
        rows.append(
            f"<tr><td><b>{escape(one.get('label', ''))}</b></td>"
            f"<td>{escape(one.get('policy_version', ''))}</td>"
            f"<td>{sections.mean_cell(one.get('pass1'))}</td>"
            f"<td>{sections.mean_cell(one.get('reward'), share=False)}</td>"
            f"<td>{svg.number(svg.finite(one.get('tokens')))}</td>"
            f"<td>{svg.number(svg.finite(one.get('minutes')))}</td>"
            f"<td>{svg.number(svg.finite(one.get('n')))}</td><td>{excluded}</td></tr>"
        )
    return (
        '<div class="card flush" '
        'style="margin-top:20px"><table><thead><tr><th></th><th>Version</th><th>pass@1</th>'
        "<th>Mean reward</th><th>Completion "
        "tokens</th><th>Minutes</th><th>Tasks</th><th>Excluded</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _what_was_run(data: ReportData) -> str:
    run = data.get("run") or {}
    facts = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in (run.get("facts") or {}).items()
    )
    config = ""
    if run.get("config"):
        text, cut = sections.clip(run["config"], 20_000)
        inside = f'<pre class="config">{text}</pre>{cut}'
        config = f"<details><summary>Resolved configuration</summary>{inside}</details>"
    inner = f'<dl class="facts">{facts}</dl>' if facts else '<p class="small">Nothing was noted about this run.</p>'
    return f'<h2>What was run</h2><div class="card" style="margin-top:14px">{inner}{config}</div>'


def _glossary() -> str:
    terms = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in TERMS.items())
    return f'<h2>Glossary</h2><div class="card" style="margin-top:14px"><dl class="glossary">{terms}</dl></div>'
