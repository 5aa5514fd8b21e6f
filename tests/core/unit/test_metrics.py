"""metrics: what they report about tasks, failures and the blob store, and that nothing of a closed task is left."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from math import prod
from pathlib import Path
from sys import getrefcount
from types import SimpleNamespace

import pytest
from confluent_kafka import Message
from prometheus_client import CollectorRegistry

from statemgr import Task
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.errors import DiskFull, FencedError, OutcomeUnknownError, UnavailableError
from statemgr.flows.opening.restore import StoreRestore
from statemgr.phases import Phase, announce
from statemgr.telemetry.metric_declarations import METRICS, MOST_KINDS, declared
from statemgr.telemetry.metrics import KINDS, Metrics
from statemgr.testing import JobTester
from statemgr.testing.memory_servers import MemoryServers
from tests.blob_faults import ManualClock
from tests.commits import attempt

ZERO, ONE = "Partition 0", "Partition 1"
ROOT = Path(__file__).parents[3]
NOT_OF_A_LOOP = ("micro-batches of Spark", "`statemgr standby`")


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Return name and labels (without the job) → value, without creation times and without counts of 0."""
    return {
        "/".join((sample.name, *(value for name, value in sample.labels.items() if name != "job"))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created") and (sample.value or not sample.name.endswith("_total"))
        if sample.labels.keys() - {"job", "le"}
    }


def made(job: str = "orders/of-this-test") -> Metrics:
    """Return metrics that are not served."""
    return Metrics("orders", job, None, ManualClock())


def test_nothing_of_a_closed_task_is_left() -> None:
    """B11: a task's own series end with the task, even if a value arrives late. Counts over all tasks stay."""
    metrics = made()
    task, other = metrics.of("Partition 0"), metrics.of("Partition 1")
    for told in (task, other):
        told.restoring("totals", 0.5)
        told.opened()
        told.carried(1)
        told.uploaded(2)
        with told.phase("upload"):
            pass
        told.holds(7, 8)
        told.backlog("totals", 3, 400)
        told.materialized("totals", 5)
        told.materialized("index", None, DiskFull("full"))
    for name in ("Partition 0", "Partition 1", "Partition 2"):
        announce(Phase.FENCE, name, "orders/of-this-test")
    task.close()
    task.materialized("index", 6)
    metrics.forget("Partition 1")  # it is open
    metrics.forget("Partition 2")  # it was fenced and never opened
    found = values(metrics.registry)
    assert found.pop("statemgr_last_commit_timestamp_seconds/Partition 1") == metrics.now_s()
    assert found == {
        "statemgr_restore_progress_ratio/Partition 1/totals": 0.5,
        "statemgr_commit_changes/Partition 1": 1,
        "statemgr_commit_uploaded_bytes/Partition 1": 2,
        "statemgr_commit_seconds/Partition 1/upload": 0,
        "statemgr_state_keys/Partition 1": 7,
        "statemgr_state_bytes/Partition 1": 8,
        "statemgr_segments/Partition 1/totals": 3,
        "statemgr_segments_bytes/Partition 1/totals": 400,
        "statemgr_materialization_seconds/Partition 1/totals": 5,
        "statemgr_materializations_total/made": 3,
        "statemgr_materializations_total/failed": 2,
        "statemgr_failures_total/DiskFull": 2,
    }
    metrics.of("Partition 2").close()
    metrics.close()


def test_counters_begin_at_zero() -> None:
    """Prometheus sees the first event as an increase. Only names of tasks, and of errors of others, cannot be known."""
    metrics = Metrics("orders", "orders/of-this-test", None, ManualClock(), ["blob-store"])
    begun = {f"statemgr_{name}_total" for name in ("failures", "restores", "restore_bytes", "restore_seconds")}
    begun |= {one.shown for one in declared() if one.kind == "counter" and one.known}
    left = {
        one.shown for one in declared() if one.kind == "counter" and one.labels and "task" not in one.labels
    } - begun
    assert not left
    assert metrics.batches
    found = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert begun <= {sample.name for sample in found if sample.value == 0}
    restores = {(s.labels["backend"], s.labels["reason"]) for s in found if s.name == "statemgr_restores_total"}
    assert restores == {
        *(("blob-store", reason) for reason in ("first-choice", "absent", "damaged", "unreachable")),
        ("local", "local-copy"), ("empty", "new"),
    }  # fmt: skip
    metrics.close()


def test_commits_that_an_engine_publishes_are_counted() -> None:
    """Each task's commit of a micro-batch counts, and so does one that fails."""
    config = {
        "job.name": "orders", "job.tasks": 2, "task.inputs": ["orders"], "task.backup.factories": ["blob-store"],
        "stores.totals.value.serde": "bytes",
    }  # fmt: skip
    servers = MemoryServers(config)
    servers.open()
    driver, executor, other = (servers.on_disk(servers.config, name) for name in ("driver", "executor", "other"))
    with servers.manager(driver, "kafka-partition") as manager, servers.manager(other, "kafka-partition") as next_owner:
        epoch = manager.acquire()
        names = ("Partition 0", "Partition 1")
        manager.publish([attempt(executor, epoch, name, {b"k": b"v"}, 1) for name in names])
        epoch = manager.acquire()
        commits = [attempt(executor, epoch, name, {b"k": b"w"}, 1) for name in names]
        next_owner.acquire()
        with pytest.raises(FencedError):
            manager.publish(commits)
        found = values(manager.metrics.registry)
    servers.close()
    assert found["statemgr_commits_total/published"] == 2
    assert found["statemgr_commits_total/failed"] == 2


def test_commits_without_input_are_counted() -> None:
    """A repair, and a transaction that sends output again, publish the state of all tasks. What is not needed does
    not count."""
    config = {"job.name": "orders", "job.tasks": 2, "stores.totals.value.serde": "bytes"}
    servers = MemoryServers(config)
    servers.open()
    with servers.manager(servers.on_disk(servers.config, "driver"), "kafka-partition") as manager:
        epoch = manager.acquire()
        manager.publish([attempt(manager.config, epoch, name, {b"k": b"v"}, 1) for name in (ZERO, ONE)])
        count = partial(
            manager.metrics.registry.get_sample_value,
            "statemgr_commits_total", {"job": "orders", "outcome": "published"},
        )  # fmt: skip
        manager.repair()
        assert count() == 2
        assert manager._job is not None
        manager._job.damage_of(ZERO).found("blob-store", "totals", "told to")
        manager.repair()
        assert count() == 4
        manager.publish_again([], lambda one: one)
        assert count() == 6
    servers.close()


def test_a_commit_that_cannot_begin_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try of the loop counts, and so does one of the application's own."""
    servers = MemoryServers({"job.name": "orders", "stores.totals.value.serde": "bytes"})
    servers.open()

    def refuse() -> None:
        raise OutcomeUnknownError("told to")

    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(ZERO)
        opening, position = Future[Task](), SimpleNamespace(source="orders-0", next=1, prove=lambda: None)
        opening.set_result(task)
        owned = AssignedTask(0, frozenset({"orders-0"}), 2, opening, manager.clock, 1.0, 60.0, inputs=[position])  # type: ignore[list-item]
        assert owned.restored()
        owned.dirty = True
        number = partial(manager.metrics.registry.get_sample_value, "statemgr_commits_total")
        with monkeypatch.context() as patch:
            patch.setattr(task._coordinator, "settle", refuse)
            with pytest.raises(OutcomeUnknownError):
                task.commit({"orders-0": 1})
            owned.start_commit()
            position.prove = refuse
            owned.start_commit()
        assert number({"job": "orders", "outcome": "failed"}) == 3
        failures = {"job": "orders", "kind": "OutcomeUnknownError"}
        assert manager.metrics.registry.get_sample_value("statemgr_failures_total", failures) == 3
        task.commit({"orders-0": 1})
        assert number({"job": "orders", "outcome": "failed"}) == 3
        assert number({"job": "orders", "outcome": "published"}) == 1
    servers.close()


def test_a_task_that_returns_keeps_its_new_series() -> None:
    """A late close does not change the metrics of the task's next opening."""
    metrics = made()
    before = metrics.of("Partition 0")
    after = metrics.of("Partition 0")
    after.carried(3)
    before.close()
    assert values(metrics.registry) == {"statemgr_commit_changes/Partition 0": 3}
    metrics.close()


def test_failures_are_counted_once_and_by_a_bounded_number_of_kinds() -> None:
    """An error that passes two callers counts once, and the number of error kinds is limited."""
    metrics = made()
    error = UnavailableError("gone")
    metrics.failed(error)
    metrics.failed(error)
    for number in range(MOST_KINDS):
        metrics.failed(type(f"Error{number}", (Exception,), {})())
    found = values(metrics.registry)
    assert found["statemgr_failures_total/UnavailableError"] == 1
    assert found["statemgr_failures_total/other"] == len(KINDS)
    assert len(found) == MOST_KINDS - len(KINDS) + 2
    metrics.close()


def test_a_source_that_fails_is_left_out_of_a_scrape() -> None:
    """A source that fails does not affect other sources. An unwatched source is no longer called."""
    metrics = made()
    asked: list[str] = []

    def lag() -> list[tuple[tuple[str, ...], float]]:
        asked.append("lag")
        return [(("Partition 0", "orders", "0"), 5.0)]

    def broken() -> list[tuple[tuple[str, ...], float]]:
        raise RuntimeError("closed")

    metrics.watch("input_lag", broken)
    metrics.watch("input_lag", lag)
    assert values(metrics.registry) == {"statemgr_input_lag/Partition 0/orders/0": 5}
    metrics.unwatch(lag)
    assert values(metrics.registry) == {}
    assert len(asked) == 1
    metrics.close()


def test_why_a_store_was_restored() -> None:
    """The reason for a restore is one of a few words, however long the messages are."""
    restores: dict[str, StoreRestore] = {
        "new": StoreRestore("totals", "empty"),
        "local-copy": StoreRestore("totals", "local", reasons={"blob-store": "it has no marker"}),
        "first-choice": StoreRestore("totals", "blob-store"),
        "absent": StoreRestore("totals", "kafka-changelog", reasons={"blob-store": "it has no marker"}),
        "damaged": StoreRestore("totals", "kafka-changelog", reasons={"blob-store": "gone"}, damaged=("blob-store",)),
        "unreachable": StoreRestore("t", "kafka-changelog", reasons={"b": "no answer"}, unreachable=("b",)),
    }
    assert {reason: one.reason for reason, one in restores.items()} == {reason: reason for reason in restores}


def append(task: Task, message: Message) -> None:
    """Put each value under its key."""
    task.store("totals").put(message.key() or b"", message.value() or b"")


def test_a_consumer_loop() -> None:
    """The metrics cover lag, age, sizes, restores and requests of the job's tasks, but of no task that has moved."""
    config = {
        "job.name": "orders",
        "job.tasks": 2,
        "task.inputs": ["orders"],
        "task.backup.factories": ["blob-store"],
        "task.restore.factories": ["blob-store"],
        "stores.totals.key.serde": "bytes",
        "stores.totals.value.serde": "bytes",
    }
    with JobTester(config, append) as tester:
        tester.send("orders", "a", "1", partition=1)
        tester.commit()
        registry = tester._members[0].manager.metrics.registry
        found = values(registry)
        assert found["statemgr_input_lag/Partition 1/orders/1"] == 0
        assert found["statemgr_input_lag/Partition 0/orders/0"] == 0
        assert found["statemgr_input_messages_total/Partition 1"] == 1
        assert registry.get_sample_value("statemgr_process_seconds_count", {"job": "orders"}) == 1
        assert found["statemgr_rocksdb_keys/Partition 1/totals"] == 1
        assert found["statemgr_rocksdb_memtable_bytes/Partition 1/totals"] > 0
        assert found["statemgr_rocksdb_writes_slowed/Partition 0/totals"] == 0
        limit = registry.get_sample_value("statemgr_memory_limit_bytes", {"job": "orders"})
        assert limit is not None
        assert limit >= 128 << 20
        assert registry.get_sample_value("statemgr_memory_bytes", {"job": "orders"})
        assert found["statemgr_checkpoint_timestamp_seconds/Partition 1"] > 0
        assert "statemgr_checkpoint_timestamp_seconds/Partition 0" not in found
        ages = {name: found[f"statemgr_last_commit_timestamp_seconds/{name}"] for name in (ZERO, ONE)}
        assert ages["Partition 1"] >= ages["Partition 0"] > 0
        assert found["statemgr_state_keys/Partition 1"] == 1
        assert found["statemgr_state_bytes/Partition 0"] == 0
        assert found["statemgr_blobs_with_ttl/Partition 1"] == 0
        assert found["statemgr_restore_progress_ratio/Partition 1/totals"] == 1
        assert found["statemgr_restores_total/empty/new"] == 2
        assert found["statemgr_blob_requests_total/put/ok"] > 0
        assert found["statemgr_blob_bytes_total/upload"] > 0
        tester.rebalance(members=2)
        found = values(registry)
        kept, gone = (ZERO, ONE) if tester.owner(ZERO) == 0 else (ONE, ZERO)
        assert any(kept in name for name in found)
        assert not any(gone in name for name in found)


def test_what_was_processed_and_for_how_long() -> None:
    """Batches count their messages, and each call its seconds of the task's clock. A message that is processed again
    counts again. A call that fails, and messages that are left out, do not count."""
    config = {
        "job.name": "orders",
        "task.inputs": ["orders"],
        "task.backup.factories": ["blob-store"],
        "stores.totals.key.serde": "bytes",
    }

    def process_batch(task: Task, messages: Sequence[Message]) -> None:
        for message in messages:
            append(task, message)
        tester._clock.advance(0.2 * len(messages))

    with JobTester(config, process_batch=process_batch) as tester:
        for number in range(3):
            tester.send("orders", "a", str(number))
        registry = tester._members[0].manager.metrics.registry
        found = values(registry)
        assert found["statemgr_input_messages_total/Partition 0"] == 3
        counted = {
            end: registry.get_sample_value("statemgr_process_seconds_bucket", {"job": "orders", "le": end})
            for end in ("0.1", "60.0", "+Inf")
        }
        assert counted == {"0.1": 0, "60.0": 3, "+Inf": 3}
        seconds = registry.get_sample_value("statemgr_process_seconds_sum", {"job": "orders"})
        assert seconds is not None
        assert 0.6 <= seconds < 5


def test_gauges_of_rocksdb_end_with_the_task() -> None:
    """A scrape during a close, or while a store is busy, leaves its series out, and keeps no store open."""
    metrics = made()
    task = metrics.of("Partition 0")
    known: dict[str, int | None] = {"rocksdb.actual-delayed-write-rate": 4096, "rocksdb.is-write-stopped": 1}
    store = SimpleNamespace(by_need=None, local=SimpleNamespace(gauge=known.get))
    task.watch({"totals": store})  # type: ignore[dict-item]
    assert values(metrics.registry) == {"statemgr_rocksdb_writes_slowed/Partition 0/totals": 1}
    known.clear()
    assert values(metrics.registry) == {}
    known["rocksdb.estimate-num-keys"] = 5
    assert values(metrics.registry) == {"statemgr_rocksdb_keys/Partition 0/totals": 5}
    task.close()
    assert values(metrics.registry) == {}
    before = getrefcount(store)
    assert before == 2, "nothing refers to the store any more"
    metrics.close()


def test_every_metric_is_declared_and_the_page_has_them() -> None:
    """docs/monitoring.md has the table of `scripts/metrics_table.py`, and a process serves no other metrics."""
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts" / "metrics_table.py"))["with_table"](page) == page
    metrics = made()
    known = {metric.name: (metric.kind, metric.text) for metric in declared()}
    for family in metrics.registry.collect():
        assert known[family.name] == (family.type, family.documentation)
    assert len(known) == len(list(declared()))
    metrics.close()


def test_the_page_says_how_many_series_a_process_has() -> None:
    """docs/monitoring.md has the sum of what the declarations allow, rounded up, for who plans a Prometheus server."""
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    # two backends, and those that are called local and empty
    many = {"tasks": 100, "stores": 3, "input partitions": 100, "backends": 4}
    declarations = (one for kind, found in METRICS.items() if kind not in NOT_OF_A_LOOP for one in found)
    factors = ([many.get(factor) or int(factor) for factor in one.most.split(" × ")] for one in declarations)
    assert f"at most {-(-sum(map(prod, factors)) // 100) * 100:,} series" in page


def test_errors_have_room() -> None:
    """The metrics have a series for each of statemgr's own errors, with room for those of an application."""
    assert {"CorruptBlob", "DiskFull", "FencedError"} < KINDS
    assert len(KINDS) <= MOST_KINDS - 10
