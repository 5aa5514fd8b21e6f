"""Rewrites the table of keys in docs/configuration.md, between its two marks.

``python scripts/config_table.py docs/configuration.md``
"""

from __future__ import annotations

import sys
from pathlib import Path

from statemgr.config.keys import KEYS, Key

BEGIN = "<!-- the table of keys, written by scripts/config_table.py -->"
END = "<!-- end of the table -->"


def table() -> str:
    """Every key with its kind, default and meaning."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{entry.pattern}` | {entry.kind.expected} | {_default(entry)} | {entry.doc} |" for entry in KEYS]
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The page with the table between its marks brought up to date. Raises: ValueError without the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks for the table")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def _default(entry: Key) -> str:
    if entry.default is None:
        return entry.default_text
    if isinstance(entry.default, list):
        return ", ".join(f"`{item}`" for item in entry.default) or "empty"
    if isinstance(entry.default, bool):
        return f"`{str(entry.default).lower()}`"
    return f"`{entry.default}`"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
