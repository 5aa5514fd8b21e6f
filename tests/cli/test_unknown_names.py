"""Tasks and stores that a job does not have: a command that is asked about one does not succeed with nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.backup.factories": ["kafka-changelog", "blob-store"],
    "stores.totals.value.serde": "bytes",
}


@pytest.fixture
def checkpoints(servers: MemoryServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The IDs of two checkpoints of a job whose configuration has got a store since then, in `job.toml`."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        found = []
        for number in (1, 2):
            task.store("totals").put(b"a", b"%d" % number)
            found.append(str(task.commit({"orders-0": number}).checkpoint_id))
    monkeypatch.chdir(tmp_path)
    given = {**config.to_mapping(), "stores.later.type": "rocksdb"}
    (tmp_path / "job.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items()))
    return found


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("checkpoints list", 4),
        ("checkpoints list --history", 4),
        ("checkpoints show", 4),
        ("snapshots list", 4),
        ("snapshots verify", 4),
        ("snapshots show totals", 4),
        ("snapshots diff {} {}", 4),
        ("store count totals", 4),
        ("restore --into out", 4),
        ("materialize", 4),
        ("migrate status", 4),
        ("migrate verify", 4),
        ("checkpoints rollback --to {}", 4),
        ("top --once", 4),
        ("permit --list", 2),
        ("permit --revoke", 2),
        ("standby", 2),
    ],
)
def test_an_unknown_task(checkpoints: list[str], arguments: str, status: int) -> None:
    """The exit status says that it is wrong, and the output names the task."""
    found = CliRunner().invoke(cli, [*arguments.format(*checkpoints).split(), "--task", "99"])
    assert found.exit_code == status, found.output
    assert "Partition 99" in found.stderr


@pytest.mark.parametrize("arguments", ["snapshots diff {} {}", "migrate verify", "materialize"])
def test_a_store_that_no_checkpoint_has(checkpoints: list[str], arguments: str) -> None:
    """It is missing, although the configuration has it, and another store is there."""
    stores = ["--store", "totals", "--store", "later"]
    found = CliRunner().invoke(cli, [*arguments.format(*checkpoints).split(), *stores])
    assert found.exit_code == 4, found.output
    assert "later" in found.stderr
