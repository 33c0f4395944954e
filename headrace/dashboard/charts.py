"""Small charts as inline SVG: line charts with a tooltip per point and up to two axes, utilisation strips, bars.

They need no script and no network, so the report opens without a server. Colours come from the page's CSS variables.
"""

import math
from collections.abc import Mapping, Sequence

from headrace.dashboard.hypertext import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 200, 62, 24
RIGHT = 52
"""Width of a right axis with its labels."""
STYLES = 8
"""Line styles `s0` to `s7` of the page: colours that differ in brightness, and patterns."""
STRIP_LEFT, STRIP_HEIGHT = 124, 18


def round_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that divides `span` into at most `count` intervals."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Multiples of a round step from the last one at or below `low` to the first one at or above `high`.

    whole: the step is at least 1, for axes that count.
    """
    if not high > low:
        low, high = low, low + 1.0
    step = round_step(high - low, count)
    if whole:
        step = max(1.0, step if step.is_integer() else round_step(high - low, count // 2))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def label(value: float) -> str:
    """A tick as text, without trailing zeros; tiny values with an exponent, ten thousand and more with k, M, G or T."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 1e4):
            return f"{value / factor:g}{letter}"
    return f"{value:g}" if abs(value) < 1e-4 else f"{value:.10f}".rstrip("0").rstrip(".")


Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, series: Mapping[str, Points], x_label: str, right: Mapping[str, Points] | None = None
) -> str:
    """A line per series over a shared x axis; every axis ends at round ticks that include each value and y = 0.

    right: series with an axis of their own on the right, whose ticks stand at the same heights.
    """
    drawn = [(name, _finite(points), False) for name, points in series.items()]
    drawn += [(f"{name} (right)", _finite(points), True) for name, points in (right or {}).items()]
    all_x = [x for _, points, _ in drawn for x, _ in points]
    if not all_x:
        return ""
    x_ticks = ticks(min(all_x), max(all_x), 8, whole=all(float(x).is_integer() for x in all_x))
    left_ticks, right_ticks = (_y_ticks([points for _, points, of in drawn if of is side]) for side in (False, True))
    end = WIDTH - (RIGHT if right else 12)

    def place(x: float, y: float, y_ticks: Sequence[float]) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (end - LEFT), 12 + (1 - up) * (HEIGHT - BOTTOM - 12)

    parts = [f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"']
    parts.append(f' aria-label="{escape(title)}">')
    for value in left_ticks:
        _, y = place(x_ticks[0], value, left_ticks)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(value)}</text>')
    for value in right_ticks if right else ():
        _, y = place(x_ticks[0], value, right_ticks)
        parts.append(f'<text class="right" x="{end + 6}" y="{y + 4:.1f}">{label(value)}</text>')
    for value in x_ticks:
        x, _ = place(value, left_ticks[0], left_ticks)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{label(value)}</text>')
    for index, (name, points, of_right) in enumerate(drawn):
        places = [place(*point, right_ticks if of_right else left_ticks) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="s{index % STYLES}" points="{path}"/>')
        for (x, y), point in zip(places, points, strict=True):
            tip = f"{escape(name)}: {point[1]:.4g} at {escape(x_label)} {point[0]:.4g}"
            parts.append(
                f'<circle class="s{index % STYLES}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{tip}</title></circle>'
            )
    mark = '<svg viewBox="0 0 24 8" aria-hidden="true"><polyline class="s{}" points="0,4 24,4"/></svg>'
    legend = "".join(
        f"<span>{mark.format(index % STYLES)}{escape(name)}</span>" for index, (name, _, _) in enumerate(drawn)
    )
    parts.append(f'</svg><div class="legend">{legend}<em>{escape(x_label)}</em></div></figure>')
    return "".join(parts)


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _y_ticks(series: Sequence[Points]) -> list[float]:
    values = [y for points in series for _, y in points]
    return ticks(min(0.0, *values, 0.0), max(0.0, *values, 0.0))


def busy_strips(rows: dict[str, Sequence[tuple[float, float]]], begin: float, end: float, buckets: int = 120) -> str:
    """A strip per actor over the run. A darker cell is busier; a blank one had no heartbeat."""
    marks = ticks(0.0, max(end - begin, 1e-9))
    span = marks[-1]
    width = WIDTH - STRIP_LEFT - 14
    height = STRIP_HEIGHT * len(rows) + 22
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Who worked when">']
    for row, (name, heartbeats) in enumerate(sorted(rows.items())):
        cells: dict[int, list[float]] = {}
        for moment, share in heartbeats:
            cells.setdefault(min(buckets - 1, max(0, int((moment - begin) / span * buckets))), []).append(share)
        y = STRIP_HEIGHT * row
        parts.append(f'<text x="{STRIP_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for bucket, shares in cells.items():
            share = sum(shares) / len(shares)
            x = STRIP_LEFT + bucket * width / buckets
            parts.append(
                f'<rect class="busy" x="{x:.1f}" y="{y}" width="{width / buckets + 0.3:.2f}" height="14" '
                f'opacity="{0.06 + 0.94 * share:.2f}"><title>{escape(name)}: {100 * share:.0f} % busy</title></rect>'
            )
    for value in marks:
        x = STRIP_LEFT + value / span * width
        parts.append(f'<text class="x" x="{x:.1f}" y="{height - 6}" text-anchor="middle">{label(value)} s</text>')
    parts.append("</svg>")
    return "".join(parts)


def bars(values: dict[str, float], unit: str) -> str:
    """A bar per name, longest first."""
    top = max(values.values(), default=0.0) or 1.0
    rows = []
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        rows.append(
            f"<tr><td>{escape(name)}</td><td class='bar'><div style='width:{100 * value / top:.1f}%'></div></td>"
            f"<td class='number'>{value:.1f} {escape(unit)}</td></tr>"
        )
    return f"<table class='bars'>{''.join(rows)}</table>"
