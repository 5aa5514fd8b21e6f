"""Readers that are killed while they have a store on the disk. The next one removes what they left, and no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from statemgr import JobConfig, JobReader
from statemgr.phases import Phase
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, commit
from tests.core.crash.test_kill import ROOT
from tests.jobs import job_mapping
from tests.servers import KafkaServer

STATE = {b"key-%03d" % number: b"value" * 20 for number in range(100)}


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """A job that has committed once, with its configuration in ``job.toml``."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    commit(config, STATE, 1)
    write_toml(config, tmp_path / "job.toml")
    return config


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, of this process and its children."""
    (found := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    monkeypatch.setenv("TMPDIR", str(found))
    return found


def run(directory: Path, arguments: Sequence[str], phase: Phase | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command on the job in a directory, and kill it at a phase."""
    arguments = [*arguments, "--config", str(directory / "job.toml"), "--json"]
    order = json.dumps({"arguments": arguments, "phase": phase})
    module = ["statemgr", *arguments] if phase is None else ["tests.core.crash.command_child", order]
    return subprocess.run(
        [sys.executable, "-m", *module], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )


def files(directory: Path) -> set[Path]:
    """The files of stores, wherever they are."""
    return {path for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def a_minute_later(directory: Path) -> None:
    """Make the directories of processes older than a minute."""
    for root in directory.glob("*-*"):
        os.utime(root, (root.stat().st_mtime - 61,) * 2)


@pytest.mark.parametrize("command", ["scan", "get"])
def test_a_killed_reader(config: JobConfig, tmp_path: Path, temporary: Path, command: str) -> None:
    """A dead process's store is removed from the directory for temporary files. A living process keeps its own."""
    arguments = ["store", "scan", "totals"] if command == "scan" else ["store", "get", "totals", "key-007"]
    with JobReader(config) as reader, reader.open_store(TASK, "totals") as store:
        mine = files(temporary)
        killed = run(tmp_path, arguments, Phase.SWAP)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert files(temporary) > mine
        a_minute_later(temporary)
        again = run(tmp_path, arguments)
        assert again.returncode == 0, again.stderr
        assert "value" in again.stdout
        assert files(temporary) == mine
        assert dict(store.scan(None, None)) == STATE
    assert list(temporary.iterdir()) == []


def test_a_killed_restore(config: JobConfig, tmp_path: Path) -> None:
    """The next restore into the same directory removes what a dead one left next to its target, and not what a living
    one uses."""
    out, into = tmp_path / "out", tmp_path / "out" / "Partition_0"
    left: list[set[Path]] = []

    def die() -> None:
        before = files(into)
        a_minute_later(into)
        killed = run(tmp_path, ["restore", "--into", str(out)], Phase.SWAP)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        left.append(files(into) - before)

    def others(*_: object) -> None:
        """Two restores that die while this one runs."""
        if not left:
            mine = files(into)
            die()
            die()
            assert mine
            assert files(into) == mine | left[1]

    with JobReader(config) as reader:
        reader.restore(TASK, into, progress=others)
    assert all(left)
    (into / "totals").rename(tmp_path / "first")
    die()
    a_minute_later(into)
    again = run(tmp_path, ["restore", "--into", str(out)])
    assert again.returncode == 0, again.stderr
    assert [path.name for path in into.iterdir()] == ["totals"]
