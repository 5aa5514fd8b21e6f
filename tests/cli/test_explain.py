"""``statemgr explain``: what the installed pages say about kinds of errors and faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.cli.explain import page, pages, sections
from statemgr.cli.main import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("topic", "title"),
    [
        (["UnavailableError"], "UnavailableError"),
        (["unavailableerror"], "UnavailableError"),
        (["Broker", "gone"], "Broker gone"),
        (["broker-gone"], "Broker gone"),
        (["a", "poison", "message"], "A poison message"),
    ],
)
def test_a_section_is_printed_as_it_is_on_its_page(topic: list[str], title: str) -> None:
    """Kinds of errors and faults are found by their title or by their anchor, in upper or lower case."""
    done = CliRunner().invoke(cli, ["explain", *topic])
    assert done.exit_code == 0
    assert done.stdout.strip() == {**sections("errors"), **sections("runbook"), **sections("operations")}[title]
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


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("task.commit.ms", "task.commit.ms"),
        ("stores.totals.key.serde", "stores.<name>.key.serde"),
        ("kafka.acks", "kafka.*"),
    ],
)
def test_a_key_is_explained_by_its_row_of_the_table(key: str, pattern: str) -> None:
    """With what its columns are."""
    head, rule, row = CliRunner().invoke(cli, ["explain", key]).stdout.splitlines()
    assert (head, rule) == ("| key | value | default | meaning |", "|---|---|---|---|")
    assert row.startswith(f"| `{pattern}` | ")
    assert row in page("configuration").splitlines()


@pytest.mark.parametrize("name", pages())
def test_links_lead_to_installed_pages_or_to_the_repository(name: str) -> None:
    """An operator may have nothing but the package. The programs of the examples and the pictures are not in it."""
    text = re.sub(r"```.*?```", "", page(name), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)", text)
    relative = {link for link in links if not link.startswith("https://")}
    assert relative <= {f"{other}.md" for other in pages()}
    for link in links:
        repository, _, path = link.partition("/blob/main/")
        assert not repository.endswith("statemgr/statemgr") or (ROOT / path).exists(), link
