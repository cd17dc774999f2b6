"""Line charts and bars as geometry: percent of a plot's area, tick labels, values to read.

The page scales the drawing to whatever width it has, so nothing here is in pixels. What is not a
finite number is left out of the drawing and counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 250  # of a line; beyond that a point is the mean of equally many
_TICKS = 5
_HUGE = 1e30  # nothing that a run measures is larger


@dataclass(frozen=True)
class Series:
    """One line: ``(x, y)`` in the order of x; ``color`` is 1 to 8; ``dots`` marks each point."""

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int
    dots: bool = False


@dataclass(frozen=True)
class Drawn:
    """A line as path data.

    Attributes:
        line, dots, band: SVG path data in percent; "" for none.
        x, y: the values that the page shows under the pointer.
    """

    name: str
    color: int
    line: str
    dots: str
    band: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Chart:
    """See :meth:`of`. Ticks are ``(percent, text)``; y counts from the top."""

    title: str
    note: str
    series: list[Drawn]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    x_range: tuple[float, float]
    not_finite: int
    per_point: int

    @classmethod
    def of(
        cls,
        title: str,
        note: str,
        series: Sequence[Series],
        *,
        log: bool = False,
        zero: bool = False,
    ) -> Chart:
        """Lays the series out over their common range.

        Args:
            log: logarithmic y; values that are not positive are left out like those not finite.
            zero: y begins at 0.
        """
        kept = {one.name: _kept(one.points, log) for one in series}
        dropped = sum(len(one.points) - len(kept[one.name]) for one in series)
        # A key that no line of the metrics has is an absent series, not a wrong value.
        dropped -= sum(y is None for one in series for _, y in one.points)
        shown = [one for one in series if kept[one.name]]
        every = [point for one in shown for point in kept[one.name]]
        if not every:
            return cls(title, note, [], [], [], (0, 1), dropped, 1)
        x_range = _widened(min(x for x, _ in every), max(x for x, _ in every))
        low, high = min(y for _, y in every), max(y for _, y in every)
        scale = _Log(low, high) if log else _Linear(min(low, 0.0) if zero else low, high)
        drawn, per_point = [], 1
        for one in shown:
            lowest, mean, highest, size = _thinned(kept[one.name])
            per_point = max(per_point, size)
            xs = [100 * (x - x_range[0]) / (x_range[1] - x_range[0]) for x, _ in mean]
            drawn.append(
                Drawn(
                    one.name,
                    (one.color - 1) % 8 + 1,
                    _path(xs, [scale(y) for _, y in mean]),
                    "".join(
                        f"M{x:.2f} {scale(y):.2f}h0" for x, (_, y) in zip(xs, mean, strict=True)
                    )
                    if one.dots or len(mean) == 1
                    else "",
                    _path([*xs, *xs[::-1]], [scale(y) for y in (*highest, *lowest[::-1])]) + "Z"
                    if size > 1
                    else "",
                    [x for x, _ in mean],
                    [float(f"{y:.6g}") for _, y in mean],
                )
            )
        x_ticks = [
            (100 * (x - x_range[0]) / (x_range[1] - x_range[0]), f"{x:g}")
            for x in _steps(*x_range)
            if x == int(x)
        ]
        y_ticks = [(scale(y), _short(y)) for y in scale.ticks()]
        return cls(title, note, drawn, x_ticks, y_ticks, x_range, dropped, per_point)

    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {
            "range": self.x_range,
            "series": [{"name": one.name, "x": one.x, "y": one.y} for one in self.series],
        }


@dataclass(frozen=True)
class Bars:
    """Groups of bars; ``series`` has name, color and per group the height in percent and a text."""

    title: str
    note: str
    groups: list[str]
    series: list[tuple[str, int, list[tuple[float, str]]]]

    @classmethod
    def of(
        cls,
        title: str,
        note: str,
        series: Sequence[tuple[str, Sequence[float | None], int]],
        *,
        first: int = 0,
        top: float | None = None,
        percent: bool = False,
    ) -> Bars:
        """Args: ``first`` numbers the groups; ``top`` is the full height (default: the largest)."""
        every = [v for _, values, _ in series for v in values if v is not None and _good(v)]
        largest = max(every, default=0.0)
        full = top or largest or 1.0

        def bar(value: float | None) -> tuple[float, str]:
            if value is None or not _good(value):
                return 0.0, "-"
            return 100 * value / full, f"{value:.1%}" if percent else _short(value)

        count = max((len(values) for _, values, _ in series), default=0)
        return cls(
            title,
            note,
            [str(first + index) for index in range(count)],
            [
                (name, (color - 1) % 8 + 1, [bar(value) for value in values])
                for name, values, color in series
            ],
        )


class _Linear:
    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = _widened(low, high)
        ticks = _steps(self._low, self._high)
        if len(ticks) > 1:  # up to the next tick, so that the highest value has one above it
            step = ticks[1] - ticks[0]
            self._low = min(self._low, math.floor(self._low / step + 1e-9) * step)
            self._high = max(self._high, math.ceil(self._high / step - 1e-9) * step)

    def __call__(self, y: float) -> float:
        return 100 - 100 * (y - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        return _steps(self._low, self._high)


class _Log:
    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = math.log10(low), math.log10(high)
        if self._high - self._low < 0.05:
            self._low, self._high = self._low - 0.1, self._high + 0.1

    def __call__(self, y: float) -> float:
        return 100 - 100 * (math.log10(y) - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            ticks = [
                value
                for decade in decades
                for value in (factor * 10.0**decade for factor in factors)
                if self._low - 1e-9 <= math.log10(value) <= self._high + 1e-9
            ]
            if len(ticks) >= 3:
                break
        return ticks[:: math.ceil(len(ticks) / 8)] if ticks else [10**self._low, 10**self._high]


def _good(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _kept(points: Sequence[tuple[float, float | None]], log: bool) -> list[tuple[float, float]]:
    """The points that can be drawn; what is as good as zero is zero."""
    kept = []
    for x, y in points:
        if y is None or not _good(y) or abs(y) > _HUGE:
            continue
        near = 0.0 if abs(y) < 1 / _HUGE else float(y)
        if near > 0 or not log:
            kept.append((x, near))
    return kept


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range in which floats can be told apart."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - abs(low) * 0.05 - 0.5, high + abs(high) * 0.05 + 0.5


def _steps(low: float, high: float) -> list[float]:
    """Round numbers within the range, about five."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(n for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.10g}") for n in range(first, last + 1)]


def _thinned(
    points: list[tuple[float, float]],
) -> tuple[list[float], list[tuple[float, float]], list[float], int]:
    """Lowest, mean and highest of equally many neighbours, and how many they are."""
    size = math.ceil(len(points) / MOST_POINTS)
    lowest, mean, highest = [], [], []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ys = [y for _, y in part]
        lowest.append(min(ys))
        highest.append(max(ys))
        mean.append((part[-1][0], sum(ys) / len(ys)))
    return lowest, mean, highest, size


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in zip(xs, ys, strict=True))


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
