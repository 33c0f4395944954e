"""Small charts as inline SVG: a line chart with its points' values on hover, and a strip of who was busy.

One file, no script, no network: the report opens anywhere. Colours come from the page's CSS variables.
"""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 200, 62, 24


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Evenly spaced values from low to high."""
    return [low + (high - low) * index / count for index in range(count + 1)]


def line_chart(title: str, series: dict[str, Sequence[tuple[float, float]]], x_label: str) -> str:
    """A line per series over a shared x axis; points carry their value as a tooltip."""
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    y_high = y_high if y_high > y_low else y_low + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low or 1.0)
        up = (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - 12), 12 + (1 - up) * (HEIGHT - BOTTOM - 12)

    parts = [f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in ticks(y_low, y_high):
        _, y = place(x_low, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in ticks(x_low, x_high):
        x, _ = place(value, y_low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{value:.4g}</text>')
    for index, (name, values) in enumerate(series.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in values))
        parts.append(f'<polyline class="s{index}" points="{path}"/>')
        for point in values:
            x, y = place(*point)
            tip = f"{escape(name)}: {point[1]:.4g} at {escape(x_label)} {point[0]:.4g}"
            parts.append(f'<circle class="s{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{tip}</title></circle>')
    legend = "".join(f'<span class="s{index}">{escape(name)}</span>' for index, name in enumerate(series))
    parts.append(f'</svg><div class="legend">{legend}<em>{escape(x_label)}</em></div></figure>')
    return "".join(parts)


def busy_strips(rows: dict[str, Sequence[tuple[float, float]]], begin: float, end: float, buckets: int = 120) -> str:
    """One strip per actor over the run; darker is busier, blank where nothing was heard."""
    span = max(end - begin, 1e-9)
    height = 18 * len(rows) + 22
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img">']
    for row, (name, beats) in enumerate(sorted(rows.items())):
        cells: dict[int, list[float]] = {}
        for moment, share in beats:
            cells.setdefault(min(buckets - 1, max(0, int((moment - begin) / span * buckets))), []).append(share)
        y = 18 * row
        parts.append(f'<text x="118" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for bucket, shares in cells.items():
            share = sum(shares) / len(shares)
            x = 124 + bucket * (WIDTH - 130) / buckets
            parts.append(
                f'<rect class="busy" x="{x:.1f}" y="{y}" width="{(WIDTH - 130) / buckets + 0.3:.2f}" height="14" '
                f'opacity="{0.06 + 0.94 * share:.2f}"><title>{escape(name)}: {100 * share:.0f} % busy</title></rect>'
            )
    for value in ticks(0.0, span):
        x = 124 + value / span * (WIDTH - 130)
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{value:.0f} s</text>')
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
