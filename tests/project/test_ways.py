"""The ways through the code do not become longer: ``scripts/ways.py`` counts the files that a call of a user enters."""

from __future__ import annotations

import pytest

from scripts.ways import ways

#: Way → most files.
MOST = {
    "get": 4,
    "put": 3,
    "commit, changelog": 45,
    "commit, blobs": 54,
    "commit, both": 56,
    "open, changelog": 77,
    "open, blobs": 101,
    "open, both": 98,
}


def test_no_way_enters_more_files_than_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the numbers, and compare them."""
    found = {way.name: way for way in ways()}
    with capsys.disabled():
        print(
            *(f"\n{name}: {len(way.files)} files, {way.calls} calls, {way.moves} moves" for name, way in found.items())
        )
    assert set(found) == set(MOST)
    assert {name: len(way.files) for name, way in found.items() if len(way.files) > MOST[name]} == {}
