"""The documentation matches the repository: the tests and numbers that it names exist, and its links work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
SUITES = sorted((ROOT / "statemgr" / "testing" / "conformance").glob("*.py"))
_NODE_ID = re.compile(r"tests/[\w/]+\.py::[\w:]+")
#: ``| 7 | one sentence | tests |``
_ROW = re.compile(r"^\| ([ABC]?\d+) \| (.+) \| (.*) \|$")
#: The scenarios of this release.
SCENARIOS = [
    *(f"A{n}" for n in range(1, 50)),
    *(f"{part}{n}" for part in "BC" for n in range(1, 12)),
]
#: How docstrings of tests refer to a row: words before a list or a range of numbers → the table.
_NAMES = {
    "invariant": re.compile(r"\b[Ii]nvariants? (\d+(?:(?:, | and | to )\d+)*)"),
    "protocol": re.compile(r"\b[Pp]rotocol (\d+(?:(?:, | and | to )\d+)*)"),
    "fault": re.compile(r"\b(?:FAULTS?|[Ff]aults?) (\d+(?:(?:, | and | to )\d+)*)"),
    "scenario": re.compile(r"\b([ABC]\d+)\b"),
}


def tables(page: str) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return table (by its first heading) → number → sentence and tests. Tables with the same heading are merged."""
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    rows: dict[str, tuple[str, list[str]]] = {}
    lines = (ROOT / "docs" / page).read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if following.startswith("|---"):
            rows = found.setdefault(line.split("|")[1].strip(), {})
        elif row := _ROW.match(line):
            assert row[1] not in rows, f"{page} has {row[1]} twice"
            rows[row[1]] = (row[2], _NODE_ID.findall(row[3]))
    return found


def all_tables() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the tables of both pages."""
    return tables("invariants.md") | tables("scenarios.md")


@cache
def cases_in(path: Path) -> dict[str, str]:
    """Return the tests of a file, each as the last part of its node ID, with their docstrings. Nothing is imported."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef):
            bodies = [node.body, *(suites().get(base.id, []) for base in node.bases if isinstance(base, ast.Name))]
            functions = [f for body in bodies for f in body if isinstance(f, ast.FunctionDef)]
            found |= {f"{node.name}::{f.name}": ast.get_docstring(f) or "" for f in functions}
    return {name: text for name, text in found.items() if name.rpartition("::")[2].startswith("test_")}


@cache
def suites() -> dict[str, list[ast.stmt]]:
    """Return the classes of the conformance suites with their bodies."""
    nodes = [node for path in SUITES for node in ast.parse(path.read_text()).body]
    return {node.name: node.body for node in nodes if isinstance(node, ast.ClassDef)}


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of everything in a file that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "name", path.name), ast.get_docstring(node) or ""


def numbers(text: str) -> list[str]:
    """Expand ``3`` · ``3, 4 and 7`` · ``3 to 5`` into single numbers."""
    found = []
    for part in re.split(r", | and ", text):
        first, _, last = part.partition(" to ")
        found += [str(n) for n in range(int(first), int(last or first) + 1)]
    return found


@pytest.mark.xdist_group("documents")  # both read all tests
def test_every_test_that_the_pages_name_exists() -> None:
    """A page that names a renamed or removed test fails here."""
    known = {f"{path.relative_to(ROOT).as_posix()}::{name}" for path in TESTS for name in cases_in(path)}
    named = [node for page in PAGES for node in _NODE_ID.findall(page.read_text())]
    assert len(named) > 200
    assert sorted(set(named) - known) == []


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("invariant", [str(n) for n in range(1, 18)]),
        ("protocol", [str(n) for n in range(1, 11)]),
        ("fault", [str(n) for n in range(1, 62)]),
        ("scenario", SCENARIOS),
    ],
)
def test_every_number_is_there_with_a_test(table: str, expected: list[str]) -> None:
    """Every number is there, in order, with a sentence of its own and at least one test."""
    rows = all_tables()[table]
    assert list(rows) == expected
    assert [number for number, (_, tests) in rows.items() if not tests] == []
    sentences = [sentence for sentence, _ in rows.values()]
    assert len(set(sentences)) == len(sentences)
    assert [sentence for sentence in sentences if len(sentence.split()) < 5] == []


def test_the_scenarios_of_adoptions_are_numbered_in_order() -> None:
    """Every number is there once."""
    found = re.findall(r"^\| E(\d+) \|", (ROOT / "docs" / "scenarios.md").read_text(), re.MULTILINE)
    assert [int(number) for number in found] == list(range(1, len(found) + 1))


def test_every_number_that_a_test_names_is_on_a_page() -> None:
    """A reader can look up every `A22`, `FAULT 17`, `invariant 7` or `protocol 3` in a docstring."""
    rows = all_tables()
    unknown, seen = [], set()
    for path in [*sorted((ROOT / "tests").rglob("*.py")), *SUITES]:
        for name, text in docstrings(path):
            for table, pattern in _NAMES.items():
                for found in pattern.findall(text):
                    wanted = [found] if table == "scenario" else numbers(found)
                    seen |= {(table, number) for number in wanted}
                    unknown += [f"{path.name}::{name}: {table} {n}" for n in wanted if n not in rows[table]]
    assert unknown == []
    assert {table for table, _ in seen} == set(_NAMES), "nothing was found: the docstrings are written otherwise"


@pytest.mark.xdist_group("documents")
def test_every_scenario_is_what_one_of_its_tests_says_it_is_about() -> None:
    """Each scenario's row lists at least one test whose docstring names the scenario."""
    by_test = {
        f"{path.relative_to(ROOT).as_posix()}::{name}": text for path in TESTS for name, text in cases_in(path).items()
    }
    silent = [
        number
        for number, (_, tests) in all_tables()["scenario"].items()
        if not any(re.search(rf"\b{number}\b", by_test[test]) for test in tests)
    ]
    assert silent == []


def test_the_readme_lists_every_page() -> None:
    """A reader of the repository, or of the package index, begins there."""
    linked = set(re.findall(r"\]\(docs/([a-z-]+\.md)", (ROOT / "README.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - linked == {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    """The files that links refer to exist, and so do the headings on their pages."""
    broken = []
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, heading = link.partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (heading and heading not in anchors(path)):
            broken.append(link)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return a page's headings as the anchors that GitHub makes of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
