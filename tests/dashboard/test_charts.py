"""Charts are well-formed SVG that carries its values."""

import xml.etree.ElementTree as ElementTree

from headrace.dashboard.charts import bars, busy_strips, line_chart


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
