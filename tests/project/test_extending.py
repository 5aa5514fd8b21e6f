"""docs/extending.md shows the package in examples/plug_ins unchanged, and the package's entry points exist."""

from __future__ import annotations

import tomllib
from importlib import import_module
from inspect import signature
from pathlib import Path

from examples.plug_ins.sqlite_blobs import open_store
from statemgr import JobConfig
from statemgr.ports import BlobStore, Clock
from tests.docs.blocks import blocks, run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plug_ins"


def test_the_page_shows_the_files() -> None:
    """The page shows the complete backend and project file, and the tests without the docstring of their module."""
    (project,) = blocks("docs/extending.md", "# Extending statemgr", "toml")
    (backend,) = blocks("docs/extending.md", "## A state backend")
    (tests,) = blocks("docs/extending.md", "## Tests")
    assert (PACKAGE / "pyproject.toml").read_text() == project
    assert (PACKAGE / "shared_directory.py").read_text() == backend
    assert (PACKAGE / "test_plug_ins.py").read_text().endswith(f"\n\n{tests}")


def test_the_page_shows_how_a_store_is_opened() -> None:
    """The function in the example has the signature that the page shows."""
    (shown,) = blocks("docs/extending.md", "## A blob store")
    names = {"JobConfig": JobConfig, "Clock": Clock, "BlobStore": BlobStore}
    documented, real = (signature(one, eval_str=True) for one in (run(shown, names)["open_store"], open_store))
    assert documented.parameters == real.parameters
    assert documented.return_annotation is BlobStore


def test_the_entry_points_exist() -> None:
    """Each entry point names an object in a module that the package installs."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    assert set(points) == {"statemgr.blob_stores", "statemgr.state_backends"}
    for target in [target for group in points.values() for target in group.values()]:
        module, _, name = target.partition(":")
        assert module in project["tool"]["setuptools"]["py-modules"]
        assert callable(getattr(import_module(f"examples.plug_ins.{module}"), name))
