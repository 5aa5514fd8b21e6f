"""The parts of a rescale on local stores: splitting them, making stores of tables, and reading them again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.config import JobConfig
from statemgr.errors import CorruptError, InvalidError
from statemgr.ids import CheckpointId, task_name
from statemgr.local import bulk_writer, open_snapshot, scan_in_batches, snapshot_batches
from statemgr.local.rocksdb import split as splitting
from statemgr.model.checkpoint import Attachment, ChangelogMarker, CheckpointRecord, Layout
from statemgr.model.content import Content, of_pairs
from statemgr.model.keys.partitioners import murmur2
from statemgr.operations.rescale import work as rescale_work
from statemgr.operations.rescale.built import Unit
from statemgr.operations.rescale.orders import Order
from statemgr.operations.rescale.plan import RescalePlan, plan_rescale
from statemgr.operations.rescale.tail import apply_changes, find_changes
from statemgr.operations.rescale.work import Spread, check_keys, check_range, fitting, make_store, split_range
from statemgr.ports import TopicInfo
from statemgr.services import Services
from statemgr.wiring import open_services
from tests import model_samples as sample

State = dict[bytes, bytes]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """A job with a store of each type. No server is contacted."""
    mapping = {"job.name": "split", "state.dir": str(tmp_path / "state"), "stores.memory.type": "memory"}
    made = open_services(JobConfig.from_mapping({**mapping, "stores.totals.type": "rocksdb"}))
    yield made
    made.close()


def state(count: int, task: int, tasks: int) -> State:
    """Return one task's share of many keys."""
    keys = [b"key-%06d" % number for number in range(count)]
    return {key: key * 3 for key, number in zip(keys, murmur2(keys), strict=True) if number % tasks == task}


def make(services: Services, store: str, directory: Path, items: Mapping[bytes, bytes]) -> Path:
    """Return the directory of a finished store."""
    with bulk_writer(services.config.stores[store].type, directory, {}) as writer:
        writer.write(items.items())
    return directory


def content_of(items: Mapping[bytes, bytes]) -> Content:
    """Return the content of a dictionary: its count and hash."""
    return of_pairs(iter(items.items()))


@pytest.mark.parametrize("store", ["totals", "memory"])
@pytest.mark.parametrize("most_open", [1, 200])
def test_every_key_is_in_one_new_store(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, most_open: int
) -> None:
    """A split from three tasks to five works in ranges of keys, with small tables, and in several passes."""
    monkeypatch.setattr(rescale_work, "_MOST_OPEN", most_open)
    monkeypatch.setattr(splitting, "_TABLE_SIZE", 4096)
    spread = Spread(store, "kafka-partition", "murmur2", 3, 5)
    before, tables = Content(), {task: list[str]() for task in range(5)}
    for task in range(3):
        old = make(services, store, tmp_path / f"old-{task}", state(20_000, task, 3))
        for number, bounds in enumerate([(None, b"key-007000"), (b"key-007000", None)]):
            found = split_range(services, spread, task, old, bounds, tmp_path / f"split-{task}-{number}")
            before += found.content
            for new, paths in found.tables.items():
                tables[new] += paths
    assert before == content_of(state(20_000, 0, 1))
    after = Content()
    for task in range(5):
        directory = tmp_path / f"new-{task}"
        assert make_store(services, store, tables[task], directory) > 0
        again = tmp_path / f"again-{task}"
        make_store(services, store, tables[task], again)  # the tables stay, so that a step can be repeated
        for path in (directory, again):
            opened = open_snapshot(services.config.stores[store].type, path, {})
            assert dict(opened.scan(None, None)) == state(20_000, task, 5)
            opened.close()
        after += check_range(services, spread, task, directory, None, b"key-003")
        after += check_range(services, spread, task, directory, b"key-003", None)
        with pytest.raises(CorruptError, match="key of another task"):
            check_range(services, spread, (task + 1) % 5, directory, None, None)
    assert after == before
    assert sum(map(len, tables.values())) > 15, "each table was small"


def test_a_wrong_key_stops_a_split(services: Services, tmp_path: Path) -> None:
    """Invariant 14: a single key that the partitioner would not have put there stops the split."""
    wrong = next(iter(state(100, 1, 2)))
    old = make(services, "totals", tmp_path / "old", {**state(100, 0, 2), wrong: b"1"})
    spread = Spread("totals", "kafka-partition", "murmur2", 2, 3)
    with pytest.raises(InvalidError, match="murmur2 puts it into Partition 1"):
        split_range(services, spread, 0, old, (None, None), tmp_path / "split")


def test_the_partitioner_is_found(services: Services, tmp_path: Path) -> None:
    """The first keys show the partitioner. Every partitioner fits an empty store and a job's only task."""
    names = ["murmur2", "crc32", "quix-murmur2"]
    old = make(services, "totals", tmp_path / "old", state(1000, 1, 4))
    found = fitting(services, "totals", old, "kafka-partition", names, 1, 4)
    assert list(found) == ["murmur2", "quix-murmur2"]
    assert fitting(services, "totals", old, "kafka-partition", names, 0, 4) == {}
    alone = fitting(services, "totals", old, "kafka-partition", names, 0, 1)
    assert list(alone) == names
    for same in (found, alone):  # keys without a separator are the messages' own
        assert same["murmur2"] == same["quix-murmur2"] != same.get("crc32")
    empty = make(services, "memory", tmp_path / "empty", {})
    assert fitting(services, "memory", empty, "kafka-partition", names, 1, 4) == {
        "murmur2": "murmur2",
        "crc32": "crc32",
        "quix-murmur2": "murmur2",
    }
    assert check_keys(services, Spread("totals", "kafka-partition", "murmur2", 4, 3), 1, old, None, None) == len(
        state(1000, 1, 4)
    )
    with pytest.raises(InvalidError, match="crc32 puts it into Partition"):
        check_keys(services, Spread("totals", "kafka-partition", "crc32", 4, 3), 1, old, None, None)


def test_a_scan_that_would_end_early_is_an_error(services: Services, tmp_path: Path) -> None:
    """On a damaged block, rocksdict's own iterator ends without an error. The scan raises one."""
    old = make(services, "totals", tmp_path / "old", state(20_000, 0, 1))
    (table,) = old.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 0xFF
    table.write_bytes(data)
    with pytest.raises(CorruptError):
        for _ in scan_in_batches(old, {}, None, None, 1000):
            pass


@pytest.mark.parametrize("store", ["totals", "memory"])
def test_a_batch_of_large_items_is_short(services: Services, tmp_path: Path, store: str) -> None:
    """Memory is bounded by bytes, too: in each of the processes of a rescale, and in a Python worker of Spark."""
    items = {b"%06d" % number: bytes([number % 256]) * 1_000_000 for number in range(40)}
    items |= {b"key-%06d" % number: b"small" for number in range(5_000)}
    items |= {b"last": bytes(20_000_000)}
    directory = make(services, store, tmp_path / "large", items)
    batches = list(snapshot_batches(services.config.stores[store].type, directory, {}, None, None, 2_048))
    assert dict(pair for batch in batches for pair in batch) == items
    assert max(len(batch) for batch in batches) == 2_048
    assert max(sum(len(value) for _, value in batch[:-1]) for batch in batches) < 17_000_000


# --- a later state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["totals", "memory"])
def test_changes_since_an_earlier_state(services: Services, tmp_path: Path, store: str) -> None:
    """Puts, changes and deletes are found in every range of keys, even if a store starts or ends empty."""
    source, spread = random.Random(1), Spread(store, "kafka-partition", "murmur2", 1, 3)
    first = state(9000, 0, 1)
    later = {key: b"changed" if source.random() < 0.1 else value for key, value in first.items()}
    later = {key: value for key, value in later.items() if source.random() < 0.9}
    later |= {b"key-%06d-%d" % (source.randrange(9000), n): b"new" for n in range(500)} | {b"": b"", b"z": b"last"}
    cases = [({}, later), (first, first), (first, {}), (first, later)]
    for number, (old, new) in enumerate(cases):
        before = make(services, store, tmp_path / f"{number}-before", old)
        after = make(services, store, tmp_path / f"{number}-after", new)
        files, changes = [], 0
        for part, bounds in enumerate([(None, b"key-004"), (b"key-004", b"key-0041"), (b"key-0041", None)]):
            found = find_changes(services, spread, 0, before, after, bounds, tmp_path / f"{number}-{part}.changes")
            files, changes = [*files, found.file], changes + found.changes
        assert changes == sum(old.get(key) != new.get(key) for key in old.keys() | new.keys())
        content = content_of(old)
        for task in range(3):
            mine = make(services, store, tmp_path / f"{number}-{task}", part_of(old, task, 3))
            applied = apply_changes(services, spread, task, files, mine, tmp_path / f"{number}-{task}-later")
            opened = open_snapshot(services.config.stores[store].type, tmp_path / f"{number}-{task}-later", {})
            assert dict(opened.scan(None, None)) == part_of(new, task, 3)
            opened.close()
            changes -= applied.changes
            content += applied.content
        assert changes == 0
        assert content == content_of(new), "without reading the new stores"


def part_of(items: State, task: int, tasks: int) -> State:
    """Return the items of one task."""
    return {key: value for key, value in items.items() if murmur2([key])[0] % tasks == task}


# --- the plan -----------------------------------------------------------------------------------------------------


def plan(
    before: int, after: int, partitioner: str = "kafka-partition", attachments: tuple[Attachment, ...] = ()
) -> RescalePlan:
    """Return a plan for a job whose task i has read partition i of ``orders`` up to 10 * i, with its own changelog."""
    config = JobConfig.from_mapping({"job.name": "orders", "job.tasks": after, "stores.totals.type": "memory"})
    records = {}
    for number in range(before):
        offsets = {f"orders-{number}": 10 * number}
        if partitioner != "kafka-partition":
            offsets = {f"orders-{partition}": 10 * partition for partition in range(7)}
        marker = ChangelogMarker("orders-1-totals-changelog-g4", "id", number, 5)
        checkpoint = replace(
            sample.CHECKPOINT,
            stores={"totals": "1-a-totals"},
            state_checkpoint_markers={"kafka-changelog": {"totals": marker}},
            input_offsets=offsets,
            attachments=attachments,
            batch=None,
        )
        name = task_name(number)
        records[name] = CheckpointRecord("orders", "1", name, Layout(4, before, partitioner), (checkpoint,))
    return plan_rescale(config, records, after, None)


@pytest.mark.parametrize(("before", "after"), [(4, 6), (6, 4), (1, 3), (3, 1), (5, 7), (12, 18)])
def test_which_tasks_exchange_keys(before: int, after: int) -> None:
    """A new task takes keys from exactly those old tasks whose numbers one hash can give together."""
    found = plan(before, after)
    pairs = {(number % after, number % before) for number in range(before * after)}
    assert pairs == {(task, source) for task in range(after) for source in found.sources(task)}


def test_offsets_and_topics_of_the_new_layout() -> None:
    """A task has the offsets of its partitions, or all tasks share the job's. A changelog's name has the generation."""
    assert [inputs.offsets for inputs in plan(4, 6).inputs] == [
        *({f"orders-{n}": 10 * n} for n in range(4)), {}, {},
    ]  # fmt: skip
    fewer = [sorted(inputs.offsets) for inputs in plan(4, 3).inputs]
    assert fewer == [["orders-0", "orders-3"], ["orders-1"], ["orders-2"]]
    shared = plan(4, 2, "spark-hash(string)").inputs
    assert [len(inputs.offsets) for inputs in shared] == [7, 7]
    assert plan(4, 6).changes == {"job.tasks": 6, "stores.totals.changelog.topic": "orders-1-totals-changelog-g5"}
    assert plan(4, 6).config.tasks == 4
    with pytest.raises(InvalidError, match="has 4 tasks already"):
        plan(4, 4)


def test_tasks_with_different_serdes() -> None:
    """The new tasks share one label. It is known before anything is built."""
    found = plan(2, 3)
    record = found.records["Partition 1"]
    changed = replace(record.current, serdes={"totals": ("string v1", "string v1")})
    records = {**found.records, record.task: replace(record, checkpoints=(changed,))}
    with pytest.raises(InvalidError, match="written with different serdes"):
        plan_rescale(found.config, records, 3, None)


def test_an_order_for_another_machine() -> None:
    """An order has only what the unit's old tasks need. Another machine derives the same new layout from it."""
    found = plan(4, 6)
    record = found.records["Partition 1"]
    before = replace(record.current, sequence=3, checkpoint_id=CheckpointId(1, 2), published_ms=77)
    record = replace(record, checkpoints=(record.current, before))
    found = replace(
        found,
        records={**found.records, record.task: record},
        targets={**found.targets, record.task: before},
        grouping='["string"]',
    )
    changelog = TopicInfo("orders-1-totals-changelog-g5", "id", 6, {"cleanup.policy": "compact"})
    order = Order(found, found.new_config, Unit("totals", [1, 3], [1, 3, 5]), ["murmur2"], changelog)
    read = Order.from_json(order.to_json())
    assert (read.unit, read.partitioners, read.changelog) == (order.unit, order.partitioners, changelog)
    assert read.new_config == found.new_config
    assert (read.plan.config, read.plan.before, read.plan.after) == (found.config, found.before, found.after)
    assert read.plan.grouping == found.grouping
    assert read.plan.records == {task: found.records[task] for task in ("Partition 1", "Partition 3")}
    assert read.plan.targets == {task: found.targets[task] for task in ("Partition 1", "Partition 3")}
    assert [one.published_ms for one in read.plan.records[record.task].checkpoints] == [None, 77]


@pytest.mark.parametrize("name", ["output-0", "output-unsent-0"])
def test_keys_of_an_engine_stay_where_they_are(name: str) -> None:
    """With one task every partitioner fits every key, so only the attachment shows which engine owns the keys."""
    rows = Attachment(name, inline=b"rows")
    assert plan(1, 2, "spark-hash(string)", (rows,)).tasks == 2
    assert plan(1, 2, "spark-hash(string)", (rows, Attachment("processor-state", inline=b"{}"))).processor is not None
    with pytest.raises(InvalidError, match="'other-engine'"):
        plan(1, 2, "spark-hash(string)", (rows, Attachment("other-engine", inline=b"{}")))
