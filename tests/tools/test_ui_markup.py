"""HTML of the web page: every value stays text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from statemgr_tools.ui.faults import runbook
from statemgr_tools.ui.markup import page, prose, table, tag

#: Text that HTML can hold. A parser changes or drops the excluded characters.
TEXTS = st.text(st.characters(exclude_characters="\r\x00", exclude_categories=["Cs"]))


class Parsed(HTMLParser):
    """The elements of a document, their attributes and all its text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Add an element."""
        self.elements.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        """Add text."""
        self.text += data


@given(TEXTS, TEXTS)
def test_any_text_stays_text(text: str, value: str) -> None:
    """Whatever a key or a parameter contains, the result is one element with one attribute."""
    found = Parsed(tag("a", text, href=value))
    assert found.elements == [("a", [("href", value)])]
    assert found.text == text


def test_a_table_of_hostile_cells() -> None:
    """Cells, headers and the caption are escaped, but not elements made by `tag`."""
    evil = "</td><script>alert(1)</script>"
    found = Parsed(table(evil, [evil], [[evil], [tag("b", evil)]], ""))
    names = [name for name, _ in found.elements]
    assert "script" not in names
    assert names.count("b") == 1
    assert found.text.count(evil) == 4


def test_half_a_character_does_not_break_a_page() -> None:
    """A JSON key may have half of a surrogate pair, which has no encoding."""
    assert b"&#55296;" in page("\ud800", None, "")


def test_backticks_become_code() -> None:
    """Commands in hints are set as code; a backtick without a second one stays as it is."""
    assert tag("p", prose("run `statemgr gc` or <b>")) == "<p>run <code>statemgr gc</code> or &lt;b&gt;</p>"
    assert Parsed(tag("p", prose("a ` b"))).text in ("a ` b", "a  b")


def test_the_runbook_names_the_commands_that_print_other_pages() -> None:
    """The page serves no others."""
    assert "(statemgr explain docs/operations.md)" in runbook()
    assert ".md#" not in runbook()
