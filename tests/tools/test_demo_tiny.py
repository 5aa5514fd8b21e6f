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


def test_the_numbers_of_the_readme_are_measured() -> None:
    """Each number with thousands in the README's table is in docs/performance.md, which the bench writes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = readme.partition("| what | statemgr | compared with |")[2].partition("\n\n")[0]
    numbers = re.findall(r"\d{1,3}(?:,\d{3})+", table)
    assert len(numbers) > 5
    assert [number for number in numbers if f" {number} " not in measured] == []
