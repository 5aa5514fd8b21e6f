"""``statemgr bench`` at small sizes, from the command line to the results, for cases that need no server."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr_tools.bench import registry, sweeps
from statemgr_tools.bench.result import Line, alone
from statemgr_tools.bench.session import Session

_FIELDS = {"case", "value", "unit", "reference", "reference_value", "ratio", "spread", "target", "reached"}


@pytest.mark.long
@pytest.mark.parametrize("case", ["store-calls", "restore-file"])
def test_a_small_run_measures_both_sides(tmp_path: Path, case: str) -> None:
    """Every line has a value and a measured reference. The run leaves its work directory empty."""
    command = [sys.executable, "-m", "statemgr", "bench", "--case", case, "--size", "small", "--rounds", "1"]
    run = subprocess.run(
        [*command, "--json", "--work", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert {line["case"] for line in lines} == {case}
    for line in lines:
        assert set(line) == _FIELDS
        assert line["value"] > 0
        assert line["reference_value"] > 0
        assert line["ratio"] == pytest.approx(line["value"] / line["reference_value"], rel=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case whose module needs a package that is not installed ends the command with the name of the extra."""
    monkeypatch.setattr(registry, "find", lambda name: importlib.import_module("no_such_package"))
    run = CliRunner().invoke(cli, ["bench", "--case", "store-calls", "--work", str(tmp_path)])
    assert run.exit_code == 2
    assert "these cases need no_such_package" in run.stderr
    assert "statemgr[bench,spark]" in run.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_interrupt_loses_only_the_case_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Results of the cases before it are on standard output, below one row of headers."""

    def find(name: str) -> registry.Case:
        def measure(session: Session) -> Iterator[Line]:
            if name == "commit-idle":
                raise KeyboardInterrupt
            yield alone(name, 7.25, "MB", "what was measured")

        return registry.Case(name, measure, True)

    names = ["restore-file", "store-calls", "commit-idle"]
    assert sweeps.KINDS  # it loads modules of cases, which must be in the real table
    monkeypatch.setattr(registry, "TABLE", dict.fromkeys(names, ("", True)))
    monkeypatch.setattr(registry, "find", find)
    command = ["bench", "--size", "small", "--work", str(tmp_path), *options]
    run = CliRunner().invoke(cli, command)
    assert run.exit_code != 0
    if options:
        assert [json.loads(line)["case"] for line in run.stdout.splitlines()] == names[:2]
    else:
        assert [line.split()[:2] for line in run.stdout.splitlines()] == [
            ["case", "value"],
            *([name, "7.25"] for name in names[:2]),
        ]
