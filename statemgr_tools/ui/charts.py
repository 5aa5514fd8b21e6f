"""Charts as inline SVG. Widths are percentages, so that texts keep their size on a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statemgr_tools.ui.markup import Markup, tag

_ROW = 22
_HEIGHT = 120
#: Percent of the width: the start of the bars, and the length of the longest one.
_LEFT, _LONGEST = 32, 48


def bars(title: str, rows: Sequence[tuple[str, float, str]], address: Callable[[str], str] | None = None) -> Markup:
    """Draw horizontal bars: label, value (not negative), and the value as text. A long label is cut.

    ``address``: label → the page that it links to.
    """
    most = max((value for _, value, _ in rows), default=0) or 1
    marks = []
    for place, (label, value, text) in enumerate(rows):
        y, length = place * _ROW, value / most * _LONGEST
        name = tag("text", _short(label), x="0", y=y + 15)
        marks += [
            name if address is None else tag("a", name, href=address(label)),
            tag("rect", x=f"{_LEFT}%", y=y + 4, width=f"{length:.2f}%", height=_ROW - 8, class_="bar"),
            tag("text", text, x=f"{_LEFT + length + 1:.2f}%", y=y + 15, class_="value"),
        ]
    return _figure(title, marks, len(rows) * _ROW, "; ".join(f"{label}: {text}" for label, _, text in rows))


def columns(title: str, points: Sequence[tuple[float, float, str]]) -> Markup:
    """Draw columns on a time axis: time (any unit), value (not negative), text for the mouse and screen readers."""
    first, last = (min(at for at, _, _ in points), max(at for at, _, _ in points)) if points else (0.0, 0.0)
    most = max((value for _, value, _ in points), default=0) or 1
    marks = [tag("line", x1="0", x2="100%", y1=_HEIGHT, y2=_HEIGHT, class_="axis")]
    for at, value, text in points:
        x = (at - first) / ((last - first) or 1) * 97
        height = max(value / most * (_HEIGHT - 10), 2)
        column = {"x": f"{x:.2f}%", "y": f"{_HEIGHT - height:.1f}", "width": "2%", "height": f"{height:.1f}"}
        marks.append(tag("g", tag("title", text), tag("rect", **column, class_="bar")))
    return _figure(title, marks, _HEIGHT + 4, "; ".join(text for _, _, text in points))


def _figure(title: str, marks: Sequence[Markup], height: int, told: str) -> Markup:
    picture = tag("svg", *marks, role="img", aria_label=f"{title}: {told}", width="100%", height=height)
    return tag("figure", tag("figcaption", title), picture)


def _short(label: str, most: int = 18) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
