import re
from html.parser import HTMLParser
from typing import Any

import pytest

from leyden.base.errors import RecordError
from leyden.cli.report import ReportData, render, sections, svg
from leyden.cli.report.data import Mean, StepData

SECTIONS = (
    "result",
    "run",
    "learning",
    "domains",
    "transcripts",
    "outcomes",
    "tokens",
    "forest",
    "diagnostics",
    "glossary",
)
VOID = {"meta", "br"}
UNKNOWN: Mean = {"mean": float("nan"), "low": float("-inf"), "high": float("inf")}
UNBOUNDED: Mean = {"mean": 0.5, "low": float("-inf"), "high": float("inf")}
ATTACK = "<script>alert('x')</script>\"&"


class Balanced(HTMLParser):
    """Collects ids and text; fails on a tag that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        # What closes itself (SVG) does not come here.
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def mean(value: float) -> Mean:
    return {"mean": value, "low": value - 0.05, "high": value + 0.05}


def step(number: int, **changes: Any) -> StepData:
    made: StepData = {
        "stage": "rl",
        "step": number,
        "reward_mean": 0.5,
        "reward_low": 0.4,
        "reward_high": 0.6,
        "success": 0.5,
        "loss": -0.01,
        "grad_norm": 1.0,
        "kl": None,
        "entropy": 0.4,
        "gap_mean": 1e-4,
        "gap_max": 0.01,
        "completion_tokens_mean": 30.0,
        "seconds": {"sample": 9.0, "update": 4.0},
        "num_zero_variance": 2,
    }
    made.update(changes)  # type: ignore[typeddict-item]
    return made


def full() -> ReportData:
    side: Any = {
        "policy_version": "main@0",
        "outcome": "completed",
        "success": True,
        "reward": 1.0,
        "components": {"correct": 1.0},
        "answer": "SELECT 1",
        "messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "SELECT 1"}],
    }
    return {
        "title": "A run",
        "subtitle": "of a test",
        "verdict": {
            "answer": "better",
            "candidate": "main@9",
            "incumbent": "main@0",
            "difference": 0.185,
            "low": 0.121,
            "high": 0.249,
            "p_value": 3e-9,
            "test": "exact McNemar",
            "num_tasks": 265,
            "level": 0.95,
        },
        "sentence": "61 tasks won, 12 lost",
        "looks": "This was look 2.",
        "run": {"facts": {"Machine": "2 cores", "Seed": 7}, "config": "[learn]\nsteps = 3"},
        "evaluations": [
            {
                "label": name,
                "policy_version": f"main@{n}",
                "pass1": mean(p),
                "reward": mean(p),
                "tokens": 31.5,
                "minutes": 4.0,
                "n": 265,
                "num_excluded": 1,
            }
            for n, (name, p) in enumerate([("Base", 0.05), ("SFT", 0.45), ("SFT + RL", 0.64)])
        ],
        "steps": [step(1, stage="sft", reward_mean=None), step(1), step(2), step(3)],
        "outcomes": [{"stage": "rl", "step": n, "counts": {"completed": 60, "timeout": n}} for n in (1, 2)],
        "conservation": [{"stage": "rl", "step": 1, "sampled": 1000, "trained": 900, "dropped": {"overlong": 100}}],
        "domains": [{"domain": "shop", "n": 66, "before": mean(0.3), "after": mean(0.6)}],
        "transcripts": [{"task_id": "t1", "domain": "shop", "title": "How many?", "before": side, "after": side}],
        "diagnostics": ["Task t7 is memorised."],
    }


def test_a_full_report_has_every_section_and_every_link_leads_somewhere() -> None:
    page = render(full())
    parser = read(page)
    assert [anchor for anchor in parser.ids if anchor in SECTIONS] == list(SECTIONS)
    assert set(re.findall(r'href="#([^"]+)"', page)) == set(SECTIONS)


def test_the_first_screen_says_the_verdict_and_the_three_numbers() -> None:
    text = read(render(full())).text
    first = text[: text.index("What was run", text.index("Glossary") + 8)]
    for expected in (
        "better",
        "+18.5",
        "+12.1 to +24.9",
        "61 tasks won",
        "5.0 %",
        "45.0 %",
        "64.0 %",
        "SFT + RL",
        "look 2",
    ):
        assert expected in first


def test_a_report_needs_no_network_no_other_file_and_no_script() -> None:
    page = render(full())
    assert read(page).tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(r"https?://|url\(|@import|\bsrc=", page)
    assert "prefers-color-scheme:dark" in page.replace(": ", ":") and "@media print" in page


def poisoned(value: Any) -> Any:
    """The same tree with every text made hostile."""
    if isinstance(value, dict):
        return {
            key if key not in ("Machine", "Seed", "correct", "overlong", "sample", "timeout") else key + ATTACK: (
                item if key in ("stage", "answer") and item in ("rl", "sft", "better") else poisoned(item)
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value + ATTACK if isinstance(value, str) else value


def test_everything_from_data_is_escaped() -> None:
    page = render(poisoned(full()))
    assert "<script" not in page and "alert" in page
    assert read(page).tags == read(render(full())).tags


@pytest.mark.parametrize(
    "data",
    [
        {},
        {
            "verdict": None,
            "evaluations": [],
            "steps": [],
            "outcomes": [],
            "conservation": [],
            "transcripts": [],
        },
        {"evaluations": [{"label": "Base", "pass1": {"mean": None, "low": None, "high": None}}]},
        {
            "evaluations": [{"label": "Base"}],
            "steps": [{"stage": "rl", "step": 1}],
            "domains": [{"domain": "x"}],
        },
        {"verdict": {"answer": "not separable"}, "transcripts": [{"task_id": "t"}], "run": {}},
        {"steps": [step(1, loss=float("nan"), reward_low=float("-inf"), reward_high=float("inf"))]},
        {"steps": [step(1, reward_mean=0.0, reward_low=0.0, reward_high=0.0)]},
        {"outcomes": [{"stage": "rl", "step": 1, "counts": {}}]},
        {"domains": [{"domain": "x", "before": UNKNOWN, "after": UNBOUNDED}]},
        {"evaluations": [{"label": "Base", "pass1": UNKNOWN, "reward": UNBOUNDED, "tokens": float("nan")}]},
    ],
)
def test_an_empty_or_partial_run_still_makes_a_whole_page(data: ReportData) -> None:
    page = render(data)
    read(page)
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_an_empty_run_says_that_it_is_empty() -> None:
    text = read(render({})).text
    assert "no verdict" in text and "No training step" in text and "No evaluation" in text


def test_a_key_that_no_report_has_is_an_error() -> None:
    with pytest.raises(RecordError, match="colour"):
        render({"colour": "red"})  # type: ignore[typeddict-unknown-key]


def test_the_size_is_bounded_and_what_is_left_out_is_said() -> None:
    data = full()
    pair = data["transcripts"][0]
    long: Any = {
        **pair,
        "before": {**pair["before"], "messages": [{"role": "user", "content": "x" * 50_000}] * 100},
    }
    data["transcripts"] = [long] * 100
    data["steps"] = [step(number) for number in range(5000)]
    data["conservation"] = [
        {"stage": "rl", "step": n, "sampled": 10, "trained": 10, "dropped": {}} for n in range(5000)
    ]
    page = render(data)
    assert len(page) < 3_500_000
    text = read(page).text
    assert f"{100 - sections.MAX_PAIRS} transcripts left out" in text and "46,000 more characters" in text
    assert f"{100 - sections.MAX_MESSAGES} earlier messages" in text and "4,800 earlier steps" in text


def test_tokens_that_are_not_accounted_for_stand_out() -> None:
    data = full()
    data["conservation"] = [{"stage": "rl", "step": 1, "sampled": 10, "trained": 5, "dropped": {"stale": 2}}]
    assert '<span class="mark no">3</span>' in render(data)
    assert '<span class="mark no">' not in sections.conservation(full())


def test_missing_numbers_are_gaps_in_a_line_and_not_zeros() -> None:
    chart = svg.lines([1, 2, 3, 4], [svg.Series(name="loss", ys=[1.0, None, 3.0, 4.0])], title="Loss")
    assert chart.count("<polyline") == 2 and chart.count("<circle") == 3


def test_ticks_cover_the_range_with_round_numbers() -> None:
    for low, high in [(0.0, 0.641), (-0.06, 0.03), (1e-5, 3e-5), (120.0, 98_000.0), (0.0, 1.0)]:
        marks = svg.ticks(low, high)
        assert marks[0] <= low + 1e-9 and marks[-1] >= high - 1e-9 and 2 <= len(marks) <= 8


@pytest.mark.parametrize("ends", [(-0.0083, -0.0066), (0.0, 1e-6), (0.0, 0.641), (2e-9, 1.2e-8), (120.0, 98_000.0)])
def test_labels_of_ticks_are_the_ticks_and_all_different(ends: tuple[float, float]) -> None:
    marks = svg.ticks(*ends)
    labels = svg.tick_labels(marks)
    assert len(set(labels)) == len(labels)
    assert [float(label.replace("k", "e3")) for label in labels] == pytest.approx(marks, rel=1e-9, abs=1e-12)


def test_a_few_steps_all_have_a_label_and_a_line_of_zeros_lies_on_the_floor() -> None:
    chart = svg.lines([1, 2, 3, 4], [svg.Series(name="x", ys=[0.0] * 4)], title="X", floor=0.0)
    assert all(f">{label}</text>" in chart for label in ("step 1", "2", "3", "4")) and ">-0" not in chart


def test_tool_calls_and_structured_content_are_shown() -> None:
    data = full()
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "run_sql"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "look here"}]}
    data["transcripts"][0]["after"] = {"messages": [parts, call, {"role": "tool", "content": None}]}
    text = read(render(data)).text
    assert "run_sql" in text and "look here" in text and "(empty)" in text
