"""``statemgr explain``: what the installed pages say about kinds of errors and faults."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from statemgr.cli.explain import page, sections
from statemgr.cli.main import cli


@pytest.mark.parametrize(
    ("topic", "title"),
    [
        (["UnavailableError"], "UnavailableError"),
        (["unavailableerror"], "UnavailableError"),
        (["Broker", "gone"], "Broker gone"),
        (["broker-gone"], "Broker gone"),
    ],
)
def test_a_section_is_printed_as_it_is_on_its_page(topic: list[str], title: str) -> None:
    """Kinds of errors and faults are found by their title or by their anchor, in upper or lower case."""
    done = CliRunner().invoke(cli, ["explain", *topic])
    assert done.exit_code == 0
    assert done.stdout.strip() == {**sections("errors"), **sections("runbook")}[title]
    assert done.stdout.startswith(f"## {title}\n")


def test_without_a_topic_all_are_listed() -> None:
    """One title a line, so that the output can be searched."""
    listed = CliRunner().invoke(cli, ["explain"]).stdout.splitlines()
    assert {"FencedError", "Broker gone"} <= set(listed)


def test_a_mistyped_topic_gets_the_nearest_one() -> None:
    """The hint is a command that works."""
    done = CliRunner().invoke(cli, ["explain", "FencedEror"])
    assert done.exit_code == 2
    assert "hint: did you mean `statemgr explain fencederror`?" in done.stderr


@pytest.mark.parametrize("topic", ["docs/security.md", "security"])
def test_a_page_is_printed_whole(topic: str) -> None:
    """Hints name pages, and whoever has installed the package alone has no other way to them."""
    assert CliRunner().invoke(cli, ["explain", topic]).stdout.strip() == page("security").strip()
    assert "docs/security.md" in CliRunner().invoke(cli, ["explain"]).stdout.splitlines()
