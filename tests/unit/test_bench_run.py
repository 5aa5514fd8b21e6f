"""``statemgr bench`` at small sizes, from the command line to the results, for cases that need no server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_FIELDS = {"case", "value", "unit", "reference", "reference_value", "ratio", "target", "reached"}


@pytest.mark.long
@pytest.mark.parametrize("case", ["store-calls", "restore-file"])
def test_a_small_run_measures_both_sides(tmp_path: Path, case: str) -> None:
    """Every line has a value and a measured reference. The run leaves its work directory empty."""
    command = [sys.executable, "-m", "statemgr", "bench", "--case", case, "--size", "small", "--rounds", "1"]
    run = subprocess.run(
        [*command, "--json", "--work", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = json.loads(run.stdout)
    assert {line["case"] for line in lines} == {case}
    for line in lines:
        assert set(line) == _FIELDS
        assert line["value"] > 0
        assert line["reference_value"] > 0
        assert line["ratio"] == pytest.approx(line["value"] / line["reference_value"], rel=0.01)
    assert list(tmp_path.iterdir()) == []
