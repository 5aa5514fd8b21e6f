"""Packages that a test installs into its own directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def install(module: Path, entry_points: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module as a package of the same name. ``entry_points`` is the text of its ``entry_points.txt``."""
    metadata = directory / f"{module.stem}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    shutil.copy(module, directory)
    monkeypatch.syspath_prepend(directory)
