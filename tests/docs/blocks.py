"""The code blocks of the documentation, and the tests that check them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
#: A result stated in a comment: ``totals.get("ann")  # -> 3``.
_RESULT = re.compile(r"#\s*(?:->|→)\s*(.+)$")


@dataclass(frozen=True)
class Block:
    """A code block. ``heading`` is the heading above it, including its ``#`` marks. ``language`` may be empty."""

    page: str
    line: int
    heading: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Quote:
    """A piece of code inside a sentence or a table: `` `statemgr top` ``."""

    page: str
    line: int
    text: str


@cache
def _read(path: Path) -> tuple[tuple[Block, ...], tuple[Quote, ...]]:
    page, heading, line = path.relative_to(ROOT).as_posix(), "", 1
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    blocks, quotes = [], []
    for place, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else line
        if token.type == "heading_open":
            heading = f"{token.markup} {tokens[place + 1].content}"
        elif token.type in ("fence", "code_block"):
            language = token.info.split()[0] if token.info.strip() else ""
            blocks.append(Block(page, line, heading, language, token.content))
        elif token.type == "inline":
            codes = [child.content for child in token.children or () if child.type == "code_inline"]
            quotes += [Quote(page, line, code) for code in codes]
    return tuple(blocks), tuple(quotes)


def every_block(*languages: str) -> list[Block]:
    """Return the blocks of all pages, or only those in the given languages."""
    found = [block for path in PAGES for block in _read(path)[0]]
    return [block for block in found if not languages or block.language in languages]


def every_quote() -> list[Quote]:
    """Return the pieces of code inside the sentences and tables of all pages."""
    return [quote for path in PAGES for quote in _read(path)[1]]


def blocks(page: str, heading: str, language: str = "python") -> list[str]:
    """Return the blocks of a language directly below a heading: ``blocks("docs/stores.md", "## Types")``.

    A test that calls this with literal arguments counts as checking these blocks. Raises: AssertionError if there are
    none.
    """
    found = [b.text for b in every_block(language) if (b.page, b.heading) == (page, heading)]
    assert found, f"{page} has no {language} block below the heading {heading!r}"
    return found


@cache
def claims() -> frozenset[tuple[str, str, str]]:
    """Return (page, heading, language) of each call of :func:`blocks` in a test."""
    return frozenset(claim for path in _TESTS for claim in _claims_of(path))


def _claims_of(path: Path) -> Iterator[tuple[str, str, str]]:
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "tests.docs.blocks" in text else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "blocks":
            given = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if len(given) >= 2:
                yield given[0], given[1], given[2] if len(given) > 2 else "python"


def run(program: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a program in the namespace ``names`` and check the results that its comments state (``# -> 3``).

    Raises: AssertionError for a different result, and every exception of the program.
    """
    lines = program.splitlines()
    stated = {number for number, line in enumerate(lines, 1) if _RESULT.search(line)}
    for statement in ast.parse(program).body:
        last = statement.end_lineno or statement.lineno
        if last in stated and isinstance(statement, ast.Expr):
            expression = compile(ast.Expression(statement.value), "block", "eval")
            wanted = (_RESULT.search(lines[last - 1]) or [""])[1].strip()
            found = repr(eval(expression, names))
            assert found == wanted, f"{lines[last - 1]}: it is {found}"
            stated.remove(last)
        else:
            exec(compile(ast.Module([statement], []), "block", "exec"), names)
    assert not stated, f"lines {sorted(stated)}: only an expression of its own can have a result as its comment"
    return names
