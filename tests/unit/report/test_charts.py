"""Charts are geometry: inside the plot, honest about what is left out, readable ticks."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash import charts
from dflash.charts import Bars, Chart, Series


def numbers(path):
    return [float(n) for n in re.findall(r"-?[\d.]+(?:e[-+]?\d+)?", path.replace("h0", ""))]


values = st.one_of(st.none(), st.floats(), st.integers(-(10**6), 10**6))


@given(st.lists(values, max_size=40), st.booleans(), st.booleans())
def test_whatever_the_values_the_drawing_stays_inside(ys, log, zero):
    chart = Chart.of("t", "n", [Series("a", list(enumerate(ys)), 1, dots=True)], log=log, zero=zero)
    kept = sum(len(one.x) for one in chart.series)
    assert kept + chart.not_finite + sum(y is None for y in ys) == len(ys)
    for one in chart.series:
        for number in numbers(one.line) + numbers(one.dots):
            assert -0.01 <= number <= 100.01
    for at, text in (*chart.x_ticks, *chart.y_ticks):
        assert -0.01 <= at <= 100.01 and text
    assert len(chart.y_ticks) <= 12


def test_the_highest_value_is_at_the_top_and_the_first_at_the_left():
    (line,) = Chart.of("t", "n", [Series("a", [(1, 0), (2, 10)], 1)], zero=True).series
    assert line.line == "M0.00 100.00L100.00 0.00"


def test_a_log_scale_leaves_out_what_is_not_positive_and_says_so():
    chart = Chart.of("t", "n", [Series("a", [(1, 0.0), (2, 1.0), (3, 100.0)], 1)], log=True)
    assert chart.not_finite == 1
    assert [text for _, text in chart.y_ticks] == ["1", "10", "100"]


def test_a_long_line_is_means_with_the_range_behind_it(monkeypatch):
    monkeypatch.setattr(charts, "MOST_POINTS", 2)
    points = [(1, 1.0), (2, 3.0), (3, 5.0), (4, 5.0)]
    chart = Chart.of("t", "n", [Series("a", points, 1)])
    (line,) = chart.series
    assert (chart.per_point, line.x, line.y) == (2, [2, 4], [2.0, 5.0])
    assert numbers(line.band)[1::2] == [50.0, 0.0, 0.0, 100.0], "3, 5, then back: 5, 1"


def test_one_point_is_drawn_as_a_dot():
    (line,) = Chart.of("t", "n", [Series("a", [(7, 2.0)], 1)]).series
    assert line.dots == "M50.00 50.00h0"


def test_bars_are_shares_of_the_full_height_and_carry_their_text():
    bars = Bars.of("t", "n", [("a", [0.5, math.nan], 1), ("b", [1.0], 9)], first=1, percent=True)
    assert bars.groups == ["1", "2"]
    assert bars.series == [("a", 1, [(50.0, "50.0%"), (0.0, "-")]), ("b", 1, [(100.0, "100.0%")])]


@pytest.mark.parametrize(("value", "text"), [(25_000, "25k"), (0.003, "0.003"), (1.5, "1.5")])
def test_tick_labels_are_short(value, text):
    assert charts._short(value) == text
