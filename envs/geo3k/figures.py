"""Figures of geometry with a question whose numbers stand in the picture alone, drawn with Pillow.

Invariants: a figure is drawn to scale, but for lengths in parallel lines; the same problem gives the same pixels on one
machine; what cannot be seen in the picture is never needed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from ..families import FamilyGenerator
from ..math.problems import Problem

__all__ = ["FAMILIES", "Figure", "FigureGenerator"]

SIZE = 256
"""Pixels of a side, but for squared paper."""
_MARGIN, _TEXT = 48, 20
_CELLS, _CELL = 4, 32
"""Squares of grid paper along a side, and pixels along one of them."""
_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29))

Point = tuple[float, float]
Labels = Sequence[tuple[Point, str]]


@dataclass(frozen=True)
class Figure(Problem):
    """A problem with its pictures.

    question: what the user asks; `prompt` also has the numbers of the picture, which tell one problem from another.
    images: PIL images, or what else `molt_gym.image_part` takes.
    """

    question: str = ""
    images: tuple[object, ...] = ()


def _figure(question: str, answer: int, wrong: int, lines: Sequence[Sequence[Point]], labels: Labels) -> Figure:
    return _shown(question, answer, wrong, " ".join(text for _, text in labels), _draw(lines, labels))


def _shown(question: str, answer: int, wrong: int, seen: str, image: Image.Image) -> Figure:
    # Areas and perimeters, say, may be equal.
    wrong += wrong == answer
    return Figure(f"{question} ({seen})", str(answer), strict=True, wrong=str(wrong), question=question,
                  images=(image,))


def _draw(lines: Sequence[Sequence[Point]], labels: Labels) -> Image.Image:
    """Lines through points, fitted into the picture, and texts at points of the same plane."""
    points = [point for line in lines for point in line]
    left, low = (min(point[axis] for point in points) for axis in (0, 1))
    extent = max(max(point[axis] for point in points) - least for axis, least in ((0, left), (1, low)))
    scale = (SIZE - 2 * _MARGIN) / extent

    def place(point: Point) -> Point:
        return _MARGIN + (point[0] - left) * scale, SIZE - _MARGIN - (point[1] - low) * scale

    image = Image.new("RGB", (SIZE, SIZE), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_TEXT)
    for line in lines:
        draw.line([place(point) for point in line], "black", 3, "curve")
    for point, text in labels:
        draw.text(place(point), text, "black", font, anchor="mm", stroke_width=4, stroke_fill="white")
    return image


def _beside(a: Point, b: Point, inner: Point, share: float = 0.13) -> Point:
    """A point beside the middle of a side, away from the inside."""
    middle = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    away = middle[0] - inner[0], middle[1] - inner[1]
    step = share * math.dist(a, b) / (math.hypot(*away) or 1)
    return middle[0] + away[0] * step, middle[1] + away[1] * step


def _at_corner(corner: Point, inner: Point) -> Point:
    """A point within a corner."""
    return corner[0] + 0.42 * (inner[0] - corner[0]), corner[1] + 0.42 * (inner[1] - corner[1])


def _center(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _right_triangle(rng: random.Random, difficulty: int) -> Figure:
    factor = rng.randint(1, 5 * difficulty)
    a, b, c = (factor * side for side in rng.choice(_TRIPLES[: 1 + difficulty]))
    corners = [(0.0, 0.0), (float(a), 0.0), (0.0, float(b))]
    if rng.random() < 0.5:
        corners = [(y, x) for x, y in corners]
    sides = [(corners[0], corners[1], a), (corners[0], corners[2], b), (corners[1], corners[2], c)]
    hidden = rng.randrange(3)
    inner, mark = _center(corners), 0.08 * min(a, b)
    labels = [(_beside(p, q, inner), "x" if number == hidden else str(length))
              for number, (p, q, length) in enumerate(sides)]
    wrong = (abs(b - c), abs(a - c), a + b)[hidden]
    square = [(mark, 0.0), (mark, mark), (0.0, mark)]
    return _figure("The marked angle is a right one. Find x.", sides[hidden][2], wrong,
                   [[*corners, corners[0]], square], labels)


def _angles(rng: random.Random, difficulty: int) -> Figure:
    step = 10 if difficulty == 1 else 1
    first, second = (rng.randrange(40, 81, step) for _ in range(2))
    corners = _triangle(first, second)
    inner = _center(corners)
    texts = [f"{first}°", f"{second}°", "x"]
    labels = [(_at_corner(corner, inner), text) for corner, text in zip(corners, texts, strict=True)]
    return _figure("Find the angle x in degrees.", 180 - first - second, first + second, [[*corners, corners[0]]],
                   labels)


def _isosceles(rng: random.Random, difficulty: int) -> Figure:
    base = rng.randrange(40, 76, 5 if difficulty == 1 else 1)
    corners = _triangle(base, base)
    inner = _center(corners)
    known, hidden = ((180 - 2 * base, base), (base, 180 - 2 * base))[rng.randrange(2)]
    top, left = ("x", f"{known}°") if known == base else (f"{known}°", "x")
    labels = [(_at_corner(corners[2], inner), top), (_at_corner(corners[0], inner), left)]
    ticks = [_tick(corners[0], corners[2]), _tick(corners[1], corners[2])]
    return _figure("The marked sides are equal. Find the angle x in degrees.", hidden, 180 - known,
                   [[*corners, corners[0]], *ticks], labels)


def _rectangle(rng: random.Random, difficulty: int) -> Figure:
    width, height = rng.randint(5, 9 * difficulty), rng.randint(3, 9 * difficulty)
    corners = [(0.0, 0.0), (float(width), 0.0), (float(width), float(height)), (0.0, float(height))]
    inner = _center(corners)
    share = 0.12 * max(width, height)
    labels = [((inner[0], -share), str(width)), ((width + share, inner[1]), str(height))]
    area, around = width * height, 2 * (width + height)
    asked, right, wrong = rng.choice((("area", area, around), ("perimeter", around, area)))
    return _figure(f"What is the {asked} of this rectangle?", right, wrong, [[*corners, corners[0]]], labels)


def _parallel(rng: random.Random, difficulty: int) -> Figure:
    angle = rng.randrange(40, 81, 10 if difficulty == 1 else 1)
    slant = 1 / math.tan(math.radians(angle))
    crossings = [(-slant, -1.0), (slant, 1.0)]
    same = rng.random() < 0.5
    labels = [((crossings[0][0] + 0.6, -0.7), f"{angle}°"),
              ((crossings[1][0] + (0.6 if same else -0.4), 1.0 + 0.3), "x")]
    lines = [[(-2.0, -1.0), (2.0, -1.0)], [(-2.0, 1.0), (2.0, 1.0)],
             [(-1.7 * slant, -1.7), (1.7 * slant, 1.7)]]
    right, wrong = (angle, 180 - angle) if same else (180 - angle, angle)
    return _figure("The two level lines are parallel. Find the angle x in degrees.", right, wrong, lines, labels)


def _circle(rng: random.Random, difficulty: int) -> Figure:
    radius = rng.randint(2, 30 * difficulty)
    turn = rng.uniform(0, 2 * math.pi)
    rim = [(math.cos(part * math.pi / 60), math.sin(part * math.pi / 60)) for part in range(121)]
    end = (math.cos(turn), math.sin(turn))
    labels = [((end[0] / 2 - 0.18 * end[1], end[1] / 2 + 0.18 * end[0]), str(radius))]
    return _figure("What is the diameter of this circle around the point where the line begins?", 2 * radius, radius,
                   [rim, [(0.0, 0.0), end]], labels)


def _grid(rng: random.Random, difficulty: int) -> Figure:
    cells = _CELLS * (1 if difficulty == 1 else 2)
    cell, side = _CELLS * _CELL // cells, _CELLS * _CELL
    width, height = rng.sample(range(1, cells + 1), 2)
    left, top = rng.randint(0, cells - width), rng.randint(0, cells - height)
    image = Image.new("RGB", (side, side), "white")
    draw, colour = ImageDraw.Draw(image), rng.choice(("black", "darkred", "darkgreen", "darkblue"))
    corners = left, top, left + width, top + height
    draw.rectangle([cell * end - (number > 1) for number, end in enumerate(corners)], colour)
    for place in range(0, side, cell):
        draw.line((place, 0, place, side), "silver")
        draw.line((0, place, side, place), "silver")
    area, around = width * height, 2 * (width + height)
    asked, right, wrong = ("How many squares wide is the rectangle?", width, width + height) if difficulty == 1 else (
        rng.choice((("How many squares does the rectangle cover?", area, around),
                    ("What is the perimeter of the rectangle, in sides of a square?", around, area))))
    # Demonstrations name the numbers that stand here in their order, so the place, which is not asked, is in letters.
    place = f"{'abcdefgh'[left]}{'abcdefgh'[top]}, {colour}"
    return _shown(asked, right, wrong, f"{width} {height} at {place}", image)


def _triangle(first: int, second: int) -> list[Point]:
    """Corners of a triangle on a base of 1 with these angles at its ends."""
    a, b = (math.tan(math.radians(angle)) for angle in (first, second))
    x = b / (a + b)
    return [(0.0, 0.0), (1.0, 0.0), (x, a * x)]


def _tick(a: Point, b: Point) -> list[Point]:
    """A short line across the middle of a side."""
    (x, y), (dx, dy) = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), (b[0] - a[0], b[1] - a[1])
    half = 0.04 / math.hypot(dx, dy)
    return [(x - dy * half, y + dx * half), (x + dy * half, y - dx * half)]


FAMILIES: dict[str, Callable[[random.Random, int], Figure]] = {
    "right_triangle": _right_triangle, "angles": _angles, "isosceles": _isosceles, "rectangle": _rectangle,
    "parallel": _parallel, "circle": _circle, "grid": _grid,
}
"""All families by name; "grid" is a rectangle on squared paper, whose width is counted at difficulty 1."""


class FigureGenerator(FamilyGenerator[Figure]):
    """Figures of these families, by default of "grid" at difficulty 1, which small models can learn to read, else of
    all.

    Args:
        families, difficulty, split: as for `FamilyGenerator`.
    """

    known, default = FAMILIES, tuple(FAMILIES)

    def __init__(self, families: Sequence[str] | None = None, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(("grid",) if families is None and difficulty == 1 else families, difficulty, split)
