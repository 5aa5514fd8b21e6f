"""Spark's own suites of stateful processors pass on Spark, and with state in statemgr but for the documented cases."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.spark.conftest import ROOT
from tests.spark.suites import DIFFERENT, OnSpark, OnStatemgr, collect


@pytest.fixture(scope="class", autouse=True)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the suites the session and the broker of the run, and a directory for their files."""
    with pytest.MonkeyPatch.context() as patch:
        if request.cls is not None:
            OnSpark.shared = request.getfixturevalue("spark")
            OnStatemgr.kafka = request.getfixturevalue("kafka")
            patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("suite")))
        yield


collect(globals(), OnSpark, {})
collect(globals(), OnStatemgr, DIFFERENT)


def test_the_guide_names_each_case_that_differs() -> None:
    """A case passes on both engines, or stands in the guide with its reason."""
    guide = (ROOT / "docs" / "spark.md").read_text()
    assert not [case for case in DIFFERENT if f"`{case.rpartition('.')[2]}`" not in guide]
