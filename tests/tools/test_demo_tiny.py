"""``statemgr demo --tiny``: the page shows what it prints, and a total that is wrong is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr_tools.demo import tiny
from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]
_SECONDS = re.compile(r"\d+\.\d\d s")


def test_the_readme_shows_what_it_prints() -> None:
    """All stages, the backends that restored them, and equal totals; only the times differ."""
    (shown,) = blocks("README.md", "# statemgr", "console")
    ran = CliRunner().invoke(cli, ["demo", "--tiny", "--seed", "1"])
    assert ran.exit_code == 0, ran.output
    _, _, expected = shown.partition("$ statemgr demo --tiny\n")
    assert _SECONDS.sub("_", ran.output).strip() == _SECONDS.sub("_", expected).strip()


def test_a_total_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that counts once too often changes the exit status, and the customer is named."""
    right, calls = tiny._add_up, iter(range(1_000_000))

    def wrong(task: object, message: object) -> None:
        right(task, message)  # type: ignore[arg-type]
        if next(calls) == 100:
            right(task, message)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny, "_add_up", wrong)
    monkeypatch.setattr(tiny, "_STAGES", tiny._STAGES[:1])
    ran = CliRunner().invoke(cli, ["demo", "--tiny", "--seed", "1", "--json"])
    assert ran.exit_code == 1
    assert '"seed": 1,' in ran.stdout
    assert '"equal": false' in ran.stdout
    assert re.search(r'"wrong": \[\s+"customer-\d+"\s+\]', ran.stdout)


@pytest.mark.parametrize(
    ("page", "begin", "end", "pattern"),
    [
        ("README.md", "| what | statemgr | compared with |", "\n\n", r"\d{1,3}(?:,\d{3})+"),
        ("docs/scaling.md", "| what | measured |", "\n\n", r"(?<= )\d[\d,.]*\d(?= [^|]*\|\n)"),
        ("docs/index.md", "In the same measurement", "performance.md", r"\d+\.\d"),
        ("docs/concepts.md", "the blob store was", "performance.md", r"\d+\.\d"),
    ],
)
def test_the_numbers_that_pages_repeat_are_measured(page: str, begin: str, end: str, pattern: str) -> None:
    """Each number (in the README those with thousands) is in the table that the bench writes to docs/performance.md."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(begin)[2].partition(end)[0] + "\n"
    measured = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("<!-- bench: begin -->")[2]
    numbers = re.findall(pattern, text)
    assert numbers
    assert [number for number in numbers if f" {number} " not in measured.partition("<!-- bench: end -->")[0]] == []
