"""Rewrites the table of metrics in docs/monitoring.md, between its two marks.

``python scripts/metrics_table.py docs/monitoring.md``
"""

from __future__ import annotations

import sys
from pathlib import Path

from statemgr.telemetry.metric_declarations import METRICS

BEGIN = "<!-- the table of metrics, written by scripts/metrics_table.py -->"
END = "<!-- end of the table of metrics -->"


def table() -> str:
    """Every metric with its labels, the bound of its series, and its meaning."""
    rows = ["| metric | labels | most series | meaning |", "|---|---|---|---|"]
    for heading, metrics in METRICS.items():
        rows.append(f"| **{heading}** | | | |")
        for one in metrics:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            rows.append(f"| `{one.shown}` | {labels} | {one.most} | {one.text} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The page with the table between its marks brought up to date. Raises: ValueError without the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks for the table")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
