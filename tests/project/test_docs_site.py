"""The documentation site: the navigation has every page, and the reference is complete."""

from __future__ import annotations

import importlib.util
import re
import sys
from email.message import Message
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from statemgr import errors
from statemgr.cli.explain import documentation, see
from statemgr.cli.main import _built_in
from statemgr.errors import StatemgrError

ROOT = Path(__file__).parents[2]
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StatemgrError)]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """scripts/site/reference.py, which generates the pages of the reference."""
    path = ROOT / "scripts" / "site" / "reference.py"
    spec = importlib.util.spec_from_file_location("site_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation(reference: ModuleType) -> None:
    """A page that is missing from `nav` in mkdocs.yml cannot be found on the site. Add it there."""
    listed = set(re.findall(r"([\w./-]+\.md)$", NAVIGATION, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    generated = {*reference.names(), "changelog.md", "contributing.md"}
    assert listed == pages | generated


def test_every_picture_has_a_title_and_is_readable_on_a_dark_page() -> None:
    """Each picture has a title for screen readers, colours for both schemes, and fits a phone."""
    pictures = sorted((ROOT / "docs" / "images").glob("*.svg"))
    assert len(pictures) >= 6
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.findtext("{http://www.w3.org/2000/svg}title"), picture.name
        assert "prefers-color-scheme:dark" in picture.read_text(encoding="utf-8"), picture.name
        assert int(root.attrib["width"]) <= 400, picture.name


def test_the_reference_has_every_command_and_every_kind_of_error(reference: ModuleType) -> None:
    """The generated pages have every command, the public names, the metrics and the messages."""
    assert re.findall(r"^## statemgr (\S+)$", reference.cli_page(), re.MULTILINE) == sorted(_built_in())
    assert "`statemgr_commits_total` | counter | job, outcome |" in reference.metrics_page()
    assert "`statemgr_input_lag` | gauge | job, task, topic, partition |" in reference.metrics_page()
    assert "::: statemgr.JobConfig\n" in reference.api_page("statemgr")
    messages = reference.messages_page("https://example.org", ["spark_integration"])
    assert {"BatchMismatch", "ConfigError"} <= set(re.findall(r"^## (\w+)$", messages, re.MULTILINE))


def test_every_kind_of_error_has_a_section_and_its_exit_status() -> None:
    """The link of an error leads to its section, and the table on the page has the exit status of each kind."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [kind.__name__ for kind in KINDS]
    rows = re.findall(r"^\| [— ]*\[`(\w+)`\]\(#(\w+)\) \| (\d) \|", page, re.MULTILINE)
    assert rows == [(kind.__name__, kind.__name__.lower(), str(kind.exit_status)) for kind in KINDS]
    sections = re.split(r"^## \w+$", page, flags=re.MULTILINE)[1:]
    assert [text for text in sections if len(text.split()) < 10] == []


def test_an_error_knows_its_section() -> None:
    """A plug-in's error leads to the section of its nearest known base class: by a command, as long as the package's
    metadata names no published site.
    """

    class OfAPlugIn(errors.MissingBlob):
        """A kind that is not in this package."""

    assert documentation() is None
    assert see(errors.FencedError("m")) == "statemgr explain FencedError"
    assert see(OfAPlugIn("m")) == "statemgr explain MissingBlob"


def test_a_published_site_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the package's metadata names the address of the documentation, an error links to its section there."""
    found = Message()
    found["Project-URL"] = "Source, https://example.org/source"
    found["Project-URL"] = "Documentation, https://example.org/docs/"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: found)
    assert see(errors.FencedError("m")) == "https://example.org/docs/errors#fencederror"
