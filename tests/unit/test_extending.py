"""docs/extending.md shows the package in examples/plug_ins as it is, and its entry points lead somewhere."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plug_ins"


def test_the_page_shows_the_files() -> None:
    """The backend and the project file are there whole, and the tests from their imports on."""
    page = (ROOT / "docs" / "extending.md").read_text()
    shown = [(PACKAGE / name).read_text().rstrip() for name in ("pyproject.toml", "shared_directory.py")]
    shown.append((PACKAGE / "test_plug_ins.py").read_text().partition("import pytest\n")[2].rstrip())
    assert [text[:80] for text in shown if text not in page] == []


def test_the_entry_points_exist() -> None:
    """Each names an object of a module that the package installs."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    assert set(points) == {"statemgr.blob_stores", "statemgr.state_backends"}
    for target in [target for group in points.values() for target in group.values()]:
        module, _, name = target.partition(":")
        assert module in project["tool"]["setuptools"]["py-modules"]
        assert callable(getattr(import_module(f"examples.plug_ins.{module}"), name))
