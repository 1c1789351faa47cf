"""Small charts as inline SVG: bars with error bars, lines with bands, stacked bars, before and after.

Promises: colours come from classes and custom properties of the page, so a chart follows dark and light;
every mark has a `<title>` that says its numbers; numbers that are missing are gaps, never zeros. Text is
escaped here. Does not decide what is shown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Number = float | None

LABEL_PX = 8.3
"""Mean width of a character under a bar: names that are longer than its place are cut, not written over each other."""
MAX_LABELLED = 6
"""So many steps all have a label below a small chart."""
MAX_POINTS = 400
"""More steps than this share a point (mean of neighbours): finer than the pixels of a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    """For the legend and tooltips."""
    ys: Sequence[Number]
    """One value per x; None is a gap."""
    lows: Sequence[Number] | None = None
    """Lower edge of a band."""
    highs: Sequence[Number] | None = None
    """Upper edge of a band."""
    colour: int = 1
    """Which of the page's series colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with an interval; fractions."""

    label: str
    """Under the bar."""
    note: str
    """Under the label, smaller."""
    mean: Number
    low: Number
    high: Number


def finite(value: object) -> Number:
    """`value` as a number that can be drawn, or None: NaN and infinity stand for what was not measured."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def number(value: Number, digits: int = 3) -> str:
    """`value` for people: significant digits, thousands separated, a long dash for none."""
    if value is None or not math.isfinite(value):
        return "&ndash;"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2e}"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def cut(text: str, most: int) -> str:
    """`text` in at most so many characters; the whole of it stands in the tip or a table."""
    return text if len(text) <= most else text[: max(1, most - 1)] + "\u2026"


def percent(value: Number) -> str:
    """A fraction as a percentage with one decimal."""
    return "&ndash;" if value is None or not math.isfinite(value) else f"{value * 100:.1f} %"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover low..high, about `count` of them (Heckbert 1990, "Nice numbers")."""
    span = max(high - low, 1e-12)
    raw = span / max(1, count - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw * 0.75)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(position * step, 12) for position in range(first, last + 1)]


def bars(items: Sequence[Bar], *, title: str, width: int = 560, height: int = 300, strong: int = -1) -> str:
    """Bars with error bars on a percent axis; `strong` is the position of the one that stands out."""
    left, right, top, bottom = 44, 12, 34, 52
    tops = [value for item in items for value in (item.mean, item.high) if value is not None]
    marks = [tick for tick in ticks(0.0, max([0.1, *tops]), 5) if tick <= 1.0 + 1e-9]
    ceiling = max(marks[-1], *tops, 0.1)
    inner_w, inner_h = width - left - right, height - top - bottom
    y_of = scale(0.0, ceiling, top + inner_h, top)
    parts = [opening(width, height, title)]
    parts += [grid_line(left, width - right, y_of(tick), f"{tick * 100:.0f} %") for tick in marks]
    slot = inner_w / max(1, len(items))
    bar_w = min(86.0, slot * 0.5)
    for position, item in enumerate(items):
        centre = left + slot * (position + 0.5)
        parts.append(_bar(item, centre, bar_w, y_of, position == strong % len(items)))
        parts.append(words(centre, height - bottom + 20, cut(item.label, int(slot / LABEL_PX)), "label"))
        parts.append(words(centre, height - bottom + 38, item.note, "note"))
    parts.append(f'<line class="axis" x1="{left}" x2="{width - right}" y1="{y_of(0):.1f}" y2="{y_of(0):.1f}"/></svg>')
    return "".join(parts)


def _bar(item: Bar, centre: float, bar_w: float, y_of: "Scale", last: bool) -> str:
    if item.mean is None:
        return words(centre, y_of(0) - 8, "not measured", "note")
    y = y_of(item.mean)
    tip = f"{item.label}: {percent(item.mean)} ({percent(item.low)} to {percent(item.high)})"
    edge = y if item.high is None else y_of(item.high)
    parts = [
        f'<g><title>{_plain(tip)}</title><rect class="bar{" last" if last else ""}" '
        f'x="{centre - bar_w / 2:.1f}" '
        f'y="{y:.1f}" width="{bar_w:.1f}" height="{max(1.5, y_of(0) - y):.1f}" rx="3"/>'
    ]
    if item.low is not None and item.high is not None:
        parts.append(_whisker(centre, y_of(item.low), edge))
    parts.append(f'<text class="value" x="{centre:.1f}" y="{edge - 9:.1f}">{percent(item.mean)}</text></g>')
    return "".join(parts)


def lines(
    xs: Sequence[int],
    series: Sequence[Series],
    *,
    title: str,
    width: int = 360,
    height: int = 210,
    floor: Number = None,
) -> str:
    """Lines over steps, with bands; `floor` is a value that the y axis must include."""
    xs, series = _thin(xs, series)
    values = [
        value
        for one in series
        for column in (one.ys, one.lows or (), one.highs or ())
        for value in column
        if value is not None and math.isfinite(value)
    ]
    if not xs or not values:
        return ""
    low, high = min(values), max(values)
    if floor is not None:
        low, high = min(low, floor), max(high, floor)
    if high - low < 1e-12:
        pad = abs(high) * 0.1 or 0.1
        low, high = low if low == floor else low - pad, high + pad
    marks = ticks(low, high)
    labels = tick_labels(marks)
    left, right, top, bottom = 14 + 6.4 * max(map(len, labels)), 12, 10, 26
    x_of = scale(xs[0], xs[-1], left + 6, width - right - 6)
    y_of = scale(marks[0], marks[-1], height - bottom, top)
    parts = [opening(width, height, title)]
    parts += [grid_line(left, width - right, y_of(mark), text) for mark, text in zip(marks, labels, strict=True)]
    for x in (xs[position] for position in _labelled(len(xs))):
        parts.append(words(x_of(x), height - 8, _step(x, xs[0]), "tick"))
    for one in series:
        parts.append(_band(xs, one, x_of, y_of))
        parts.append(_path(xs, one, x_of, y_of))
    parts.append("</svg>")
    return "".join(parts)


def stacked(
    xs: Sequence[int],
    stacks: Mapping[str, Sequence[float]],
    *,
    title: str,
    unit: str,
    colours: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    width: int = 1060,
    height: int = 220,
) -> str:
    """Stacked bars per step; `stacks` maps a name to one value per step, drawn bottom up in its order.

    `colours` are the page's series colours in that order; at least as many as there are names.
    """
    xs, stacks = _merge(xs, stacks)
    totals = [sum(column) for column in zip(*stacks.values(), strict=True)]
    if not totals or max(totals) <= 0:
        return ""
    marks = ticks(0.0, max(totals))
    labels = tick_labels(marks)
    left, right, top, bottom = 14 + 6.4 * max(map(len, labels)), 12, 10, 26
    y_of = scale(0.0, marks[-1], height - bottom, top)
    slot = (width - left - right) / len(xs)
    bar_w = min(34.0, max(1.0, slot * 0.78))
    parts = [opening(width, height, title)]
    parts += [grid_line(left, width - right, y_of(mark), text) for mark, text in zip(marks, labels, strict=True)]
    for position, x in enumerate(xs):
        base = 0.0
        for colour, (name, column) in zip(colours, stacks.items(), strict=False):
            value = column[position]
            if value > 0:
                upper, lower = y_of(base + value), y_of(base)
                parts.append(
                    f'<rect class="fill s{colour}" x="{left + slot * (position + 0.5) - bar_w / 2:.1f}" '
                    f'y="{upper:.1f}" width="{bar_w:.1f}" height="{max(0.6, lower - upper - 0.8):.1f}">'
                    f"<title>step {x}, {escape(name)}: {number(value)} {escape(unit)}</title></rect>"
                )
                base += value
    for position in _labelled(len(xs)):
        parts.append(words(left + slot * (position + 0.5), height - 8, _step(xs[position], xs[0]), "tick"))
    parts.append("</svg>")
    return "".join(parts)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Swatches with names; the number is the series colour."""
    return (
        '<div class="legend">'
        + "".join(f'<span><i class="swatch s{colour}"></i>{escape(name)}</span>' for name, colour in names)
        + "</div>"
    )


def before_after(before: tuple[Number, Number, Number], after: tuple[Number, Number, Number], *, title: str) -> str:
    """Two intervals on one axis from 0 to 100 %; each is (mean, low, high)."""
    width, height = 260, 34
    x_of = scale(0.0, 1.0, 8, width - 8)
    parts = [opening(width, height, title)]
    parts += [
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 2}"/>'
        for x in map(x_of, (0.0, 0.25, 0.5, 0.75, 1.0))
    ]
    for (mean, low, high), y, name in ((before, 11, "before"), (after, 23, "after")):
        if mean is None:
            continue
        if low is not None and high is not None:
            ends = f'x1="{x_of(max(0.0, low)):.1f}" x2="{x_of(min(1.0, high)):.1f}"'
            parts.append(f'<line class="range {name}" {ends} y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot {name}" cx="{x_of(mean):.1f}" cy="{y}" r="4.5"/>')
    parts.append("</svg>")
    return "".join(parts)


class Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._slope = (end - start) / (high - low) if high != low else 0.0
        self._flat = (start + end) / 2 if high == low else None

    def __call__(self, value: float) -> float:
        return self._flat if self._flat is not None else self._start + (value - self._low) * self._slope


def scale(low: float, high: float, start: float, end: float) -> Scale:
    return Scale(low, high, start, end)


def opening(width: int, height: int, title: str) -> str:
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">'


def _step(step: int, first: int) -> str:
    return f"step {step}" if step == first else str(step)


def _plain(text: str) -> str:
    return escape(text.replace("&ndash;", "-"))


def words(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def grid_line(left: float, right: float, y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick y" x="{left - 6:.1f}" y="{y + 4:.1f}">{escape(text)}</text>'
    )


def _whisker(x: float, low: float, high: float) -> str:
    left = x - 8
    path = f"M{left:.1f} {high:.1f}h16M{x:.1f} {high:.1f}V{low:.1f}M{left:.1f} {low:.1f}h16"
    return f'<path class="whisker" d="{path}"/>'


def _labelled(num: int) -> list[int]:
    """Positions of the steps that get a label: all of a few, else the ends and the middle."""
    return list(range(num)) if num <= MAX_LABELLED else [0, num // 2, num - 1]


def tick_labels(marks: Sequence[float]) -> list[str]:
    """Each mark in as few digits as tell them apart."""
    step = marks[1] - marks[0]
    if max(map(abs, marks)) >= 10_000:
        return [f"{mark / 1000:g}k" if mark else "0" for mark in marks]
    if step < 1e-3:
        digits = math.floor(math.log10(max(map(abs, marks)))) - math.floor(math.log10(step) + 1e-9)
        return [f"{mark:.{digits}e}" if mark else "0" for mark in marks]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{mark:.{digits}f}" for mark in marks]


def _runs(xs: Sequence[int], columns: Sequence[Sequence[Number]]) -> list[list[int]]:
    """Positions between gaps."""
    runs: list[list[int]] = [[]]
    for position in range(len(xs)):
        whole = all(value is not None and math.isfinite(value) for value in (column[position] for column in columns))
        if whole:
            runs[-1].append(position)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _band(xs: Sequence[int], one: Series, x_of: Scale, y_of: Scale) -> str:
    if one.lows is None or one.highs is None:
        return ""
    parts = []
    for run in _runs(xs, (one.lows, one.highs)):
        there = [f"{x_of(xs[position]):.1f},{y_of(one.highs[position] or 0.0):.1f}" for position in run]
        back = [f"{x_of(xs[position]):.1f},{y_of(one.lows[position] or 0.0):.1f}" for position in reversed(run)]
        parts.append(f'<polygon class="band s{one.colour}" points="{" ".join(there + back)}"/>')
    return "".join(parts)


def _path(xs: Sequence[int], one: Series, x_of: Scale, y_of: Scale) -> str:
    parts = []
    few = len(xs) <= 60
    for run in _runs(xs, (one.ys,)):
        points = [(x_of(xs[position]), y_of(one.ys[position] or 0.0), position) for position in run]
        parts.append(
            f'<polyline class="line s{one.colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)}"/>'
        )
        for x, y, position in points:
            tip = f"step {xs[position]}: {number(one.ys[position])}"
            if one.lows is not None and one.highs is not None:
                tip += f" ({number(one.lows[position])} to {number(one.highs[position])})"
            radius = 2.4 if few else 1.2
            parts.append(
                f'<circle class="point s{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
                f"<title>{escape(one.name)}, {_plain(tip)}</title></circle>"
            )
    return "".join(parts)


def _thin(xs: Sequence[int], series: Sequence[Series]) -> tuple[Sequence[int], Sequence[Series]]:
    if len(xs) <= MAX_POINTS:
        return xs, series
    size = math.ceil(len(xs) / MAX_POINTS)

    def thin(column: Sequence[Number] | None) -> list[Number] | None:
        if column is None:
            return None
        blocks = (column[start : start + size] for start in range(0, len(column), size))
        return [_mean([value for value in block if value is not None]) for block in blocks]

    return list(xs[size - 1 :: size]) + ([xs[-1]] if len(xs) % size else []), [
        Series(
            name=one.name,
            ys=thin(one.ys) or (),
            lows=thin(one.lows),
            highs=thin(one.highs),
            colour=one.colour,
        )
        for one in series
    ]


def _mean(values: Sequence[float]) -> Number:
    return math.fsum(values) / len(values) if values else None


def _merge(
    xs: Sequence[int], stacks: Mapping[str, Sequence[float]]
) -> tuple[Sequence[int], Mapping[str, Sequence[float]]]:
    size = math.ceil(len(xs) / 160)
    if size <= 1:
        return xs, stacks
    return list(xs[size - 1 :: size]) + ([xs[-1]] if len(xs) % size else []), {
        name: [math.fsum(column[start : start + size]) for start in range(0, len(column), size)]
        for name, column in stacks.items()
    }
