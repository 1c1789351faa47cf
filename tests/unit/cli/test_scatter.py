"""Charts of quality against cost: every label can be read, however close the versions are."""

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.test_report import read
from tests.unit.release.making import evaluation

from leyden.cli.report.compare import render_comparison
from leyden.cli.report.placing import KEY_PX, LINE_PX, POINT_PX, Box, label_px, place
from leyden.cli.report.scatter import MAX_LABEL, Point, scatter
from leyden.release.side_by_side import Method, Training, side_by_side

INSIDE = Box(54.0, 2.0, 304.0, 210.0)
NAMES = ["base", "prompts", "SFT", "RL", "prompts + RL"]
LABEL = re.compile(r'<text class="beside"[^>]* x="([\d.]+)" y="([\d.]+)">([^<]*)</text>')


def five_versions(*, close: bool) -> str:
    """The page of five versions; with `close` all of the trained ones lie nearly on one point."""
    methods = []
    for number, name in enumerate(NAMES):
        solved = 20 + (40 + number % 2 if number and close else 14 * number)
        tokens = 210.0 + (3 * number if close else 160 * (number % 3) + 40 * number)
        result = evaluation(
            [[1.0]] * solved + [[0.0]] * (100 - solved), number, tokens=tokens, usd=tokens * 2e-6,
            latency_s=1.0 + tokens / 400,
        )  # fmt: skip
        training = Training(minutes=12.0 * number, tokens=90_000 * number, usd=0.4 * number)
        methods.append(Method(name=name, evaluation=result, training=training))
    return render_comparison(side_by_side(methods, calls_per_month=50_000), title="Five versions")


@pytest.mark.parametrize("close", [False, True])
def test_the_labels_of_five_versions_do_not_lie_on_each_other(close: bool) -> None:
    html = five_versions(close=close)
    read(html)
    charts = [part for part in re.findall(r"<svg.*?</svg>", html, re.S) if 'class="beside"' in part]
    assert len(charts) == 3, "tokens, latency and money"
    for chart in charts:
        found = [(float(x), float(y), text) for x, y, text in LABEL.findall(chart)]
        assert [text for _, _, text in found] == NAMES
        boxes = [Box(x - KEY_PX, y - 12.5, label_px(t)) for x, y, t in found]
        assert all(a.shared_with(b) < 1.0 for a, b in combinations(boxes, 2))


@given(
    st.lists(st.tuples(st.floats(54, 338), st.floats(16, 214)), min_size=1, max_size=6),
    st.lists(st.integers(1, 12), min_size=6, max_size=6),
)
def test_six_labels_find_places_of_their_own_wherever_the_points_are(
    points: list[tuple[float, float]], lengths: list[int]
) -> None:
    labels = ["x" * length for length, _ in zip(lengths, points, strict=False)]
    boxes = place(points, labels, INSIDE)
    assert boxes == place(points, labels, INSIDE), "the same points give the same places"
    for a, b in combinations(boxes, 2):
        assert a.shared_with(b) == 0.0
    for box in boxes:
        assert INSIDE.shared_with(box) == pytest.approx(box.width * LINE_PX), "a label leaves the picture"


def test_a_label_alone_stands_right_beside_its_point_and_one_at_the_edge_on_the_other_side() -> None:
    (alone,) = place([(100.0, 100.0)], ["base"], INSIDE)
    assert alone.left == pytest.approx(100 + POINT_PX) and alone.top == pytest.approx(100 - LINE_PX / 2)
    (edge,) = place([(355.0, 100.0)], ["base"], INSIDE)
    assert edge.left + edge.width <= 355 - POINT_PX + 1e-6 or abs(edge.top + LINE_PX / 2 - 100) >= POINT_PX


def test_long_names_are_cut_and_whole_in_the_tip() -> None:
    name = "a version with a very long name <b>"
    point = Point(
        label=name, x=1.0, x_low=None, x_high=None, y=0.5, y_low=None, y_high=None, colour=1, on_front=True, tip=name
    )
    chart = scatter([point], title="t", x_unit="u")
    (label,) = [text for _, _, text in LABEL.findall(chart)]
    assert len(label) == MAX_LABEL and label.endswith("\u2026")
    assert "very long name &lt;b&gt;</title>" in chart
