"""The programs in docs/spark.md."""

from __future__ import annotations

import re

from tests.spark.conftest import ROOT


def programs(heading: str) -> list[str]:
    """The Python blocks between a heading (such as ``### TTL``) and the next one."""
    page = (ROOT / "docs" / "spark.md").read_text()
    _, found, section = page.partition(f"\n{heading}\n")
    assert found, f"docs/spark.md has no heading {heading!r}"
    blocks: list[str] = []
    for part in re.split(r"(```.*?```)", section, flags=re.DOTALL):
        if part.startswith("```python\n"):
            blocks.append(part.removeprefix("```python\n").removesuffix("```"))
        elif not part.startswith("```") and re.search(r"^##", part, re.MULTILINE):
            break
    return blocks
