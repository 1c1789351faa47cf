"""Where labels of points stand, so that none lies on another label or on a point.

Promises: the same points give the same places; a label is inside the picture; two labels overlap only where no place of
all that are tried is free. Places are tried from near to far around each point, the most crowded points first.
Lengths are pixels, y grows downwards. Does not draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

CHAR_PX = 8.8
"""Mean width of a character of a label (13 px, bold) in the widest font of the page, DejaVu Sans."""
KEY_PX = 14.0
"""For the dot in the colour of the version, before its name."""
LINE_PX = 16.0
POINT_PX = 11.0
"""Radius around a point that labels keep free."""
DISTANCES_PX = (8.0, 16.0, 26.0, 38.0, 52.0, 68.0, 86.0, 106.0)
NUM_ANGLES = 16


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    width: float
    height: float = LINE_PX

    def shared_with(self, other: "Box") -> float:
        """Area of the overlap."""
        across = min(self.left + self.width, other.left + other.width) - max(self.left, other.left)
        down = min(self.top + self.height, other.top + other.height) - max(self.top, other.top)
        return max(0.0, across) * max(0.0, down)

    def nearest_to(self, x: float, y: float) -> tuple[float, float]:
        """The point of it that is nearest to another."""
        return min(max(x, self.left), self.left + self.width), min(max(y, self.top), self.top + self.height)


def place(points: Sequence[tuple[float, float]], labels: Sequence[str], inside: Box) -> list[Box]:
    """A box for each label, in the order of the points."""
    around = [Box(x - POINT_PX, y - POINT_PX, 2 * POINT_PX, 2 * POINT_PX) for x, y in points]
    order = sorted(range(len(points)), key=lambda k: -sum(around[k].shared_with(other) for other in around))
    placed: dict[int, Box] = {}
    for k in order:
        taken = [*placed.values(), *around]
        x, y = points[k]
        candidates = _around(x, y, label_px(labels[k]), inside)
        placed[k] = min(candidates, key=partial(_badness, taken=taken, x=x, y=y))
    return [placed[k] for k in range(len(points))]


def label_px(label: str) -> float:
    """Width of a label with its key and a gap after it."""
    return KEY_PX + CHAR_PX * len(label) + 4


def _badness(box: Box, *, taken: Sequence[Box], x: float, y: float) -> tuple[float, float]:
    near_x, near_y = box.nearest_to(x, y)
    return round(sum(box.shared_with(other) for other in taken), 6), math.hypot(near_x - x, near_y - y)


def _around(x: float, y: float, width: float, inside: Box) -> list[Box]:
    """Places from near to far, the right side first; each is pushed into the picture."""
    found = []
    for distance in DISTANCES_PX:
        for number in range(NUM_ANGLES):
            angle = (number + 1) // 2 * (1 if number % 2 else -1) * 2 * math.pi / NUM_ANGLES
            reach = POINT_PX + distance - DISTANCES_PX[0]
            near_x, near_y = x + reach * math.cos(angle), y + reach * math.sin(angle)
            left = near_x - width * (1 - math.cos(angle)) / 2
            top = near_y - LINE_PX * (1 - math.sin(angle)) / 2
            left = min(max(left, inside.left), inside.left + inside.width - width)
            top = min(max(top, inside.top), inside.top + inside.height - LINE_PX)
            found.append(Box(left, top, width))
    return found
