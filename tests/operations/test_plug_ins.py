"""A job runs on a blob store of another package as it does on a built-in one."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.plug_ins import sqlite_blobs
from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from tests.commits import TASK, write
from tests.jobs import job_mapping
from tests.plug_ins import install
from tests.servers import KafkaServer


def test_a_job_runs_on_a_blob_store_of_another_package(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point for the scheme is enough for commits, a restore on another machine, and the clean-up."""
    install(
        Path(sqlite_blobs.__file__),
        "[statemgr.blob_stores]\nsqlite = sqlite_blobs:open_store\n",
        tmp_path / "site",
        monkeypatch,
    )
    database = tmp_path / "blobs.db"
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",)) | {"blob.store.uri": f"sqlite://{database}"}
    for number in range(4):
        # each commit is on another machine
        config = JobConfig.from_mapping(mapping | {"state.dir": str(tmp_path / f"machine-{number}")})
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            assert dict(task.store("totals").range()) == {b"%d" % n: b"x" for n in range(number)}
            write(task, {b"%d" % number: b"x"})
            task.commit({"orders-0": number})
    with closing(sqlite3.connect(database)) as blobs:
        expiring, kept = (
            blobs.execute(f"SELECT count(*) FROM blobs WHERE expires IS {null} NULL").fetchone()[0]
            for null in ("NOT", "")
        )
    assert (expiring, kept > 0) == (0, True)
    path = tmp_path / "job.toml"
    path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
    result = CliRunner().invoke(cli, ["gc", "--config", str(path), "--json"])
    assert result.exit_code == 0, result.output
