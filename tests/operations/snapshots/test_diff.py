"""``statemgr snapshots diff``: the keys that changed between two checkpoints, from every backend."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.flows import state_diff
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, commit, current
from tests.histories import history, identity_of, job
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, with_changes
from tests.kafka_jobs import committed
from tests.servers import KafkaServer, S3Server

Diff = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Diff:
    """Run the command with ``--json``. Returns its exit status and the objects that it printed."""
    monkeypatch.chdir(tmp_path)

    def run(config: JobConfig, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        write_toml(config, tmp_path / "job.toml")
        result = CliRunner().invoke(cli, ["snapshots", "diff", "--json", *arguments])
        return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]

    return run


def expected(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> dict[str, tuple[str, str | None, str | None]]:
    """Maps each changed key to its kind of change and both values, computed from the states themselves."""
    found = {}
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        if was != now:
            kind = "added" if was is None else "deleted" if now is None else "changed"
            found[key.decode()] = (kind, was.decode() if was else None, now.decode() if now else None)
    return found


@pytest.mark.parametrize(
    ("backup", "kind"),
    [
        pytest.param(("kafka-changelog",), SNAPSHOTS, id="changelog", marks=pytest.mark.long),
        pytest.param(("blob-store",), SNAPSHOTS, id="snapshots", marks=pytest.mark.long),
        pytest.param(("blob-store",), SEGMENTS, id="segments"),
        pytest.param(DUAL, SEGMENTS, id="dual"),
    ],
)
def test_every_pair_of_checkpoints(
    kafka: KafkaServer, tmp_path: Path, diff: Diff, backup: tuple[str, ...], kind: str
) -> None:
    """The diff lists added, changed and deleted keys in key order, forward and backward. The diff of a checkpoint with
    itself is empty."""
    config = job(kafka, tmp_path, backup=backup, kind=kind)
    states = history(config)
    ids = [identity_of(config, number) for number in (3, 2, 1, 0)]
    for older in range(4):
        for newer in range(4):
            status, lines = diff(config, ids[older], ids[newer])
            found = {line["key"]: (line["change"], line["before"], line["after"]) for line in lines}
            assert found == expected(states[older], states[newer])
            assert list(found) == sorted(found)
            assert all((line["task"], line["store"]) == (TASK, "totals") for line in lines)
            assert status == (0 if older == newer else 1)


def test_two_states_that_share_a_snapshot_are_fetched_once(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second state takes the snapshot's files from the first one and fetches only its own segments."""
    config = job(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, s3=s3, stores__totals__type="rocksdb")
    rows: dict[bytes, bytes | None] = {
        b"key-%05d" % number: random.Random(number).randbytes(100) for number in range(5000)
    }
    commit(config, rows, 0)
    commit(config, {b"one": b"1"}, 1)
    commit(config, {b"two": b"2", b"one": None}, 2)
    elsewhere = with_changes(config, state__dir=str(tmp_path / "empty"))
    fetched = []
    restore_store = state_diff.restore_store

    def noted(*arguments: Any) -> Any:
        committed, restored = restore_store(*arguments)
        fetched.append(restored.bytes_fetched)
        return committed, restored

    monkeypatch.setattr(state_diff, "restore_store", noted)
    status, lines = diff(elsewhere, identity_of(config, 1), identity_of(config, 0))
    assert status == 1
    assert [(line["key"], line["change"]) for line in lines] == [("one", "deleted"), ("two", "added")]
    assert fetched[0] > 400_000
    assert fetched[1] < 20_000
    assert not list((tmp_path / "empty").rglob("compare-*")), "the scratch directory is empty again"


def test_which_keys_are_shown_and_how(kafka: KafkaServer, tmp_path: Path, diff: Diff) -> None:
    """Options limit the keys, replace the store's serde, and select a task or a store. Unknown stores, tasks and
    checkpoints are refused."""
    config = job(kafka, tmp_path, tasks=2)
    commit(config, {b"a": b"1", b"b": b'{"x": 1}'}, 1)
    commit(config, {b"a": b"2", b"b": b'{"x": 2}', b"c": b"3"}, 2)
    config = with_changes(config, stores__totals__value__serde="json", stores__counts__value__serde="json")
    older, newer = identity_of(config, 1), identity_of(config, 0)
    status, lines = diff(config, older, newer, "--limit", "2")
    assert status == 1
    assert [(line["key"], line["before"], line["after"]) for line in lines] == [("a", 1, 2), ("b", {"x": 1}, {"x": 2})]
    lines = diff(config, older, newer, "--value-serde", "hex", "--task", "0", "--store", "totals")[1]
    assert [line["after"] for line in lines] == [b"2".hex(), b'{"x": 2}'.hex(), b"3".hex()]
    assert diff(config, older, newer, "--store", "nothing")[0] == 2
    assert diff(config, older, newer, "--task", "1")[0] == 4
    assert diff(config, older, "1700000000000-000001")[0] == 4
    write_toml(config, tmp_path / "job.toml")
    shown = CliRunner().invoke(cli, ["snapshots", "diff", older, newer])
    assert shown.stdout.splitlines()[0] == f"{TASK}\ttotals\tchanged\ta\t1 → 2"


def test_a_store_that_only_one_checkpoint_has(kafka: KafkaServer, tmp_path: Path, diff: Diff) -> None:
    """All keys of such a store count as added, and a configuration without the store is refused. The diff publishes
    nothing."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1"}, 1)
    both = with_changes(config, stores__more__value__serde="bytes")
    with StateManager(both) as manager, manager.open_task(TASK, allow_new_stores=True) as task:
        task.store("more").put(b"new", b"1")
        task.commit({"orders-0": 2})
    older, newer = identity_of(both, 1), identity_of(both, 0)
    before = current(both)
    records = committed(both, both.checkpoint_topic)
    status, lines = diff(both, older, newer)
    assert (status, [(line["store"], line["key"], line["change"]) for line in lines]) == (1, [("more", "new", "added")])
    assert diff(config, older, newer)[0] == 2
    assert before is not None
    assert current(both) == before
    assert committed(both, both.checkpoint_topic) == records, "nothing was published"
