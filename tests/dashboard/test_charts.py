"""Charts are well-formed SVG that carries its values."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from headrace.dashboard.charts import bars, busy_strips, label, line_chart, ticks
from headrace.dashboard.page import STYLE


def test_a_line_chart_is_well_formed_and_scaled() -> None:
    text = line_chart("A < B", {"one": [(0, 0.25), (1, 0.5), (2, 1.0)]}, "step")
    tree = ElementTree.fromstring(text)
    heights = [float(circle.attrib["cy"]) for circle in tree.iter("circle")]
    assert heights == sorted(heights, reverse=True), "larger values stand higher"
    assert tree.find("figcaption") is not None and tree.find("figcaption").text == "A < B"  # type: ignore[union-attr]


def test_nothing_to_draw_is_no_chart() -> None:
    assert line_chart("empty", {"none": []}, "step") == ""


def test_strips_and_bars_escape_names() -> None:
    strips = ElementTree.fromstring(busy_strips({"a<b": [(1.0, 0.5), (2.0, 1.0)]}, 0.0, 4.0))
    opacity = [float(cell.attrib["opacity"]) for cell in strips.iter("rect")]
    assert opacity == sorted(opacity) and opacity[-1] == 1.0
    table = ElementTree.fromstring(bars({"x&y": 2.0, "z": 1.0}, "CPU-s"))
    assert [row[0].text for row in table] == ["x&y", "z"]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 0.915, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0.0, 457.0, ["0", "100", "200", "300", "400", "500"]),
        (-0.0031, 0.0044, ["-0.004", "-0.002", "0", "0.002", "0.004", "0.006"]),
        (0.0, 4.6e9, ["0", "1G", "2G", "3G", "4G", "5G"]),
        (0.0, 1.2e6, ["0", "250k", "500k", "750k", "1M", "1.25M"]),
        (0.0, 0.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, labels: list[str]) -> None:
    assert [label(value) for value in ticks(low, high)] == labels


def test_an_axis_that_counts_has_whole_ticks() -> None:
    assert ticks(0, 3, 8, whole=True) == [0, 1, 2, 3]
    assert ticks(0, 19, 8, whole=True) == [0, 5, 10, 15, 20]


def test_every_label_of_a_chart_is_round_and_every_point_lies_between_the_outer_ticks() -> None:
    chart = line_chart("t", {"one": [(0, 0.137), (39, 0.915), (20, math.nan)]}, "step")
    tree = ElementTree.fromstring(chart)
    axis = {name: [text for text in tree.iter("text") if text.attrib["class"] == name] for name in ("x", "y")}
    assert [text.text for text in axis["y"]] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [text.text for text in axis["x"]] == ["0", "5", "10", "15", "20", "25", "30", "35", "40"]
    bounds = [float(text.attrib["x"]) for text in axis["x"]]
    assert all(bounds[0] <= float(circle.attrib["cx"]) <= bounds[-1] for circle in tree.iter("circle"))
    assert len(list(tree.iter("circle"))) == 2, "a value that is not a number is not drawn"


def test_a_right_axis_has_its_own_ticks_at_the_edges_of_the_left_one() -> None:
    rate, entropy = [(0, 0.3), (9, 0.9)], [(0, 0.02), (9, 0.004)]
    tree = ElementTree.fromstring(line_chart("t", {"rate": rate}, "step", {"entropy": entropy}))
    axis = {name: [text for text in tree.iter("text") if text.attrib["class"] == name] for name in ("y", "right")}
    assert [text.text for text in axis["y"]] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [text.text for text in axis["right"]] == ["0", "0.005", "0.01", "0.015", "0.02"]
    for end in (0, -1):
        assert axis["y"][end].attrib["y"] == axis["right"][end].attrib["y"]
    heights = {
        name: [float(c.attrib["cy"]) for c in tree.iter("circle") if c.attrib["class"] == name] for name in ("s0", "s1")
    }
    assert heights["s0"][0] > heights["s0"][1] and heights["s1"][0] < heights["s1"][1]
    assert heights["s1"][0] == 12.0, "the largest entropy lies on the top tick of its own axis"


def test_lines_differ_in_style_and_not_in_colour_alone() -> None:
    tree = ElementTree.fromstring(line_chart("t", {str(n): [(0, n), (1, n)] for n in range(6)}, "step"))
    lines = [line.attrib["class"] for line in tree.iter("polyline")]
    assert lines[:6] == [f"s{n}" for n in range(6)] and sorted(lines[6:]) == lines[:6], "the legend shows the same"
    dashes = [re.search(rf"\.{name} {{[^}}]*dasharray: ([^;}}]*)", STYLE) for name in lines[:6]]
    assert len({found and found[1].strip() for found in dashes}) >= 5
