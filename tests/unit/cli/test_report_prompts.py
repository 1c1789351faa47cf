"""The section about prompts: escaped, bounded, and there only for a run that improved prompts."""

from leyden.cli.report import ReportData, render
from leyden.cli.report.data import PromptsData

ROUND = {"step": 1, "score": 0.75, "num_versions": 3, "num_rollouts": 40, "num_reflections": 4,
         "reflection_tokens": 1234, "reflection_usd": 0.5, "num_garbage": 1}  # fmt: skip
PROMPTS: PromptsData = {
    "version": "main@3",
    "rounds": [ROUND],
    "slots": [
        {"name": "system", "where": "system message", "before": "old <b>", "after": "new <b>"},
        {"name": "tool", "where": "description of tool t", "before": "same", "after": "same"},
    ],
    "diff": "--- harness\n+++ final\n-old <b>\n+new <b>\n same",
}


def page(prompts: PromptsData) -> str:
    data: ReportData = {"title": "t", "prompts": prompts}
    return render(data)


def test_the_difference_the_rounds_and_the_texts_are_shown_and_escaped() -> None:
    html = page(PROMPTS)
    assert '<a href="#prompts">Prompts</a>' in html and "Difference main@3" in html
    assert "<del>-old &lt;b&gt;</del>\n<ins>+new &lt;b&gt;</ins>\n same" in html
    assert "<ins>+++" not in html and "<b>" not in html.split('id="prompts"')[1].split("</section>")[0]
    assert "1,234" in html and "tool, description of tool t (unchanged)" in html


def test_a_run_that_found_nothing_says_so() -> None:
    assert "No other prompts did better" in page({"rounds": [], "slots": [], "diff": ""})


def test_a_long_difference_is_cut_and_other_runs_have_no_such_section() -> None:
    html = page({"diff": "+" + "x" * 50_000, "slots": [], "rounds": []})
    assert len(html) < 60_000 and "30,001 more characters left out" in html
    assert 'id="prompts"' not in render({"title": "t"})
