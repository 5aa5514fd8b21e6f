"""Every block of the documentation states its language, and a test checks it."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import Block, blocks, claims, every_block, run

#: A test in this folder has a case for each block of these languages.
_EACH_IS_CHECKED = {"sh", "console", "toml", "json"}
#: Tests ask for blocks of these languages, and for sessions that show output, with `blocks(page, heading, language)`.
#: Another test runs the Python blocks that no test asks for.
_ASKED_FOR = {"python", "yaml", "text"}
#: Text that no test can compare, by page and beginning, with the reason.
NOT_COMPARED = {
    ("README.md", "┌"): "a drawing of the parts",
    ("docs/architecture.md", "input topics"): "a drawing of the parts",
    ("docs/first-answer.md", "start of the opening"): "a drawing of the steps",
    ("docs/format.md", "offset  size  what"): "a layout, which tests/core/unit/test_codec.py has byte by byte",
    ("docs/format.md", "…     8     sequence"): "a layout, which tests/core/unit/test_codec.py covers",
    ("docs/format.md", "<job.name>/"): "patterns of names, which tests/core/unit/test_ids.py covers",
    (
        "docs/format.md",
        'header   5   "SMCS"',
    ): "a layout, which tests/core/unit/test_segment_format.py reads",
    (
        "docs/quickstart.md",
        "$ python totals.py",
    ): "tests/spark/test_guide.py runs it, and compares its totals",
    ("docs/sizing.md", "1 producers,"): "a measurement, made once on a real broker",
    (
        "docs/spark.md",
        'rows.groupBy("user")',
    ): "Spark's line above the one that replaces it; the program below it runs",
}


def not_compared(block: Block) -> tuple[str, str] | None:
    """Return the entry of the table that matches a block."""
    return next((key for key in NOT_COMPARED if key[0] == block.page and block.text.lstrip().startswith(key[1])), None)


def problem(block: Block) -> str | None:
    """Return why nothing checks a block and what to do, or None."""
    if not block.language:
        return f"{block}: write its language after the fence: one of {sorted(_EACH_IS_CHECKED | _ASKED_FOR)}"
    if block.language not in _EACH_IS_CHECKED | _ASKED_FOR:
        return f"{block}: nothing checks {block.language!r}. Use a known language, or add a test for it to tests/docs"
    shows_output = block.language == "console" and re.search("^[^$]", block.text, re.MULTILINE)
    if (block.language in {*_EACH_IS_CHECKED, "python"} and not shows_output) or not_compared(block):
        return None
    if (block.page, block.heading, block.language) not in claims():
        asked = f"blocks({block.page!r}, {block.heading!r}, {block.language!r})"
        return f"{block}: no test checks it. Compare it in a test with what the program gives, and get it with {asked}"
    return None


def test_something_checks_every_block() -> None:
    """A test checks every block. The failure names each unchecked block, and what to do about it."""
    found = [wrong for block in every_block() if (wrong := problem(block))]
    assert not found, "\n".join(found)


def test_the_table_of_exceptions_has_only_what_is_there() -> None:
    """Every entry in the table of exceptions still has a block."""
    assert set(NOT_COMPARED) - {not_compared(block) for block in every_block("text", "console")} == set()


def test_every_claim_finds_blocks() -> None:
    """Every page, heading and language that a test names exists, even if that test is a long one."""
    assert claims() - {(b.page, b.heading, b.language) for b in every_block()} == set()


@pytest.mark.parametrize(
    ("language", "why"), [("", "write its language"), ("bash", "nothing checks"), ("text", "no test checks it")]
)
def test_a_block_that_nothing_checks_is_found(language: str, why: str) -> None:
    """The test above reports each kind of unchecked block."""
    assert why in (problem(Block("docs/new.md", 7, "## New", language, "…")) or "")


def test_results_in_comments_are_compared() -> None:
    """`# -> 3` after an expression states its result. After any other statement it is an error."""
    run("a = 1\na + 2  # -> 3\n", {})
    with pytest.raises(AssertionError, match="it is 3"):
        run("1 + 2  # -> 4\n", {})
    with pytest.raises(AssertionError, match="only an expression"):
        run("a = 3  # -> 3\n", {})


def test_a_section_without_blocks_is_named() -> None:
    """The error message names a heading that does not exist."""
    with pytest.raises(AssertionError, match="no python block below the heading '## Nowhere'"):
        blocks("README.md", "## " + "Nowhere")
