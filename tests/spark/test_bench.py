"""``statemgr bench`` runs Spark's cases with a tiny state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.heavy
def test_both_engines_run_batches_of_the_same_input_and_give_the_same_rows(tmp_path: Path) -> None:
    """A case prints the median and p95 of both engines, fails if their rows differ, and leaves no files behind."""
    command = [sys.executable, "-m", "statemgr", "bench", "--case", "spark-large", "--size", "small", "--json"]
    run = subprocess.run([*command, "--work", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["unit"] for line in lines] == ["ms a batch, median", "ms a batch, p95"]
    assert all(line["value"] > 0 and line["reference_value"] > 0 for line in lines)
    assert list(tmp_path.iterdir()) == []
