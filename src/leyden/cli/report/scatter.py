"""A scatter of quality against cost as inline SVG: a point per version with both intervals, and the front as a line.

Promises: as `svg`; a point without a cost is not drawn, and nothing is drawn when no point is left. Labels keep clear
of each other and of the points; one that stands away from its point is joined to it by a line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from leyden.cli.report import svg
from leyden.cli.report.placing import KEY_PX, LINE_PX, POINT_PX, Box, place
from leyden.cli.report.svg import Number

MAX_LABEL = 18
"""Characters of a label: five of them have to find room; the whole name is in the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One version."""

    label: str
    """Beside the point, cut after MAX_LABEL characters."""
    x: Number
    """Cost; None where it is not known."""
    x_low: Number
    x_high: Number
    y: Number
    """Share solved."""
    y_low: Number
    y_high: Number
    colour: int
    """Which of the page's series colours."""
    on_front: bool
    """Points of the front are full and joined, others are rings."""
    tip: str
    """Said when the pointer rests on it."""


def scatter(points: Sequence[Point], *, title: str, x_unit: str, width: int = 360, height: int = 260) -> str:
    """Cost to the right (from 0), share solved upwards; the empty text when no point has both."""
    drawn = [point for point in points if point.x is not None and point.y is not None]
    if not drawn:
        return ""
    left, right, top, bottom = 52, 22, 16, 46
    x_marks = svg.ticks(0.0, max(value for p in drawn for value in (p.x, p.x_high) if value is not None) or 1.0, 5)
    tops = [value for p in drawn for value in (p.y, p.y_high) if value is not None]
    y_marks = [mark for mark in svg.ticks(0.0, max([0.1, *tops]), 5) if mark <= 1 + 1e-9]
    x_of = svg.scale(0.0, x_marks[-1], left, width - right)
    y_of = svg.scale(0.0, max(y_marks[-1], *tops), height - bottom, top)
    parts = [svg.opening(width, height, title)]
    parts += [svg.grid_line(left, width - right, y_of(mark), f"{mark * 100:.0f} %") for mark in y_marks]
    labels = svg.tick_labels(x_marks)
    parts += [
        svg.words(x_of(mark), height - bottom + 18, label, "tick") for mark, label in zip(x_marks, labels, strict=True)
    ]
    parts.append(svg.words((left + width - right) / 2, height - 8, x_unit, "note"))
    front = sorted((p.x, p.y) for p in drawn if p.on_front and p.x is not None and p.y is not None)
    if len(front) > 1:
        # A staircase: between two points of the front nothing better was measured.
        steps = [f"{x_of(front[0][0]):.1f},{y_of(front[0][1]):.1f}"]
        for (_, before), (x, y) in pairwise(front):
            steps += [f"{x_of(x):.1f},{y_of(before):.1f}", f"{x_of(x):.1f},{y_of(y):.1f}"]
        parts.append(f'<polyline class="front" points="{" ".join(steps)}"/>')
    places = [(x_of(p.x), y_of(p.y)) for p in drawn if p.x is not None and p.y is not None]
    names = [svg.cut(point.label, MAX_LABEL) for point in drawn]
    boxes = place(places, names, Box(left + 2, 2, width - left - 4, height - bottom - 4))
    parts += [_point(point, x_of, y_of) for point in drawn]
    parts += [_label(point, name, box, at) for point, name, box, at in zip(drawn, names, boxes, places, strict=True)]
    parts.append("</svg>")
    return "".join(parts)


def _point(point: Point, x_of: svg.Scale, y_of: svg.Scale) -> str:
    assert point.x is not None and point.y is not None
    x, y = x_of(point.x), y_of(point.y)
    parts = [f'<g class="s{point.colour}"><title>{escape(point.tip)}</title>']
    if point.y_low is not None and point.y_high is not None:
        parts.append(f'<path class="cross" d="M{x:.1f} {y_of(point.y_low):.1f}V{y_of(point.y_high):.1f}"/>')
    if point.x_low is not None and point.x_high is not None:
        parts.append(f'<path class="cross" d="M{x_of(point.x_low):.1f} {y:.1f}H{x_of(point.x_high):.1f}"/>')
    parts.append(f'<circle class="{"point" if point.on_front else "ring"}" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    return "".join(parts) + "</g>"


def _label(point: Point, label: str, box: Box, at: tuple[float, float]) -> str:
    near_x, near_y = box.nearest_to(*at)
    away = math.hypot(near_x - at[0], near_y - at[1])
    parts = [f'<g class="s{point.colour}"><title>{escape(point.tip)}</title>']
    if away > POINT_PX + 4:
        parts.append(f'<path class="leader" d="M{at[0]:.1f} {at[1]:.1f}L{near_x:.1f} {near_y:.1f}"/>')
    parts.append(
        f'<circle class="key" cx="{box.left + 5:.1f}" cy="{box.top + LINE_PX / 2:.1f}" r="4"/>'
        f'<text class="beside" style="text-anchor:start" x="{box.left + KEY_PX:.1f}" y="{box.top + 12.5:.1f}">'
        f"{escape(label)}</text></g>"
    )
    return "".join(parts)
