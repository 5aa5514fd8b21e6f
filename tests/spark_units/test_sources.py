"""What Spark's offset logs contain, and whether a batch continues a checkpoint. Uses real files and no Spark."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from spark_integration.context import Bound
from spark_integration.driver import Driver, Plan
from spark_integration.location import Location
from spark_integration.partitioning import Partitioning
from spark_integration.running import other_partitions
from spark_integration.sources import (
    BatchInput,
    OffsetLog,
    StartingOffsets,
    check_continues,
    flatten,
    others_of,
    to_json,
)
from statemgr.engine import open_attempt
from statemgr.errors import BatchMismatch, CorruptRecord, InvalidError
from statemgr.ids import task_name
from statemgr.testing.memory_servers import MemoryServers

Write = Callable[..., Location]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a checkpoint location as Spark does: ``write(ends of each batch, initial offsets of each source)``."""

    def make(
        ends: Mapping[int, Sequence[object]], initial: Sequence[object] = (), version: str = "v1", watermark: int = 0
    ) -> Location:
        (tmp_path / "offsets").mkdir()
        metadata = json.dumps({"batchWatermarkMs": watermark, "batchTimestampMs": 1_700_000_000_123, "conf": {}})
        for batch, sources in ends.items():
            lines = [version, metadata, *(s if isinstance(s, str) else json.dumps(s) for s in sources)]
            (tmp_path / "offsets" / str(batch)).write_text("\n".join(lines))
        for i, offsets in enumerate(initial):
            (tmp_path / "sources" / str(i)).mkdir(parents=True)
            (tmp_path / "sources" / str(i) / "0").write_text("\0v1\n" + json.dumps(offsets))
        (tmp_path / "metadata").write_text('{"id":"8f3c"}')
        return Location(None, tmp_path.as_uri())  # type: ignore[arg-type]

    return make


def test_the_first_batch_starts_at_the_initial_offsets(write: Write) -> None:
    """The initial offsets are in a file of their own, after a NUL."""
    location = write({0: [{"a": {"0": 5, "1": 7}}]}, [{"a": {"0": 1, "1": 0}}], watermark=9)
    batch = OffsetLog(location).read(0)
    assert batch == BatchInput(0, {"a-0": 1, "a-1": 0}, {"a-0": 5, "a-1": 7}, 1_700_000_000_123, 9)
    assert location.query_id() == "8f3c"


def test_a_heartbeat_has_no_offsets(write: Write) -> None:
    """The heartbeat is the last source, and is not taken for a source other than Kafka."""
    beats = [{"offset": 1, "timestamp": 1000}, {"offset": 2, "timestamp": 2000}]
    location = write({0: [{"a": {"0": 5}}, beats[0]], 1: [{"a": {"0": 5}}, beats[1]]}, [{"a": {"0": 1}}])
    log = OffsetLog(location, heartbeat=True)
    assert [(batch.start, batch.end) for batch in map(log.read, (0, 1))] == [
        ({"a-0": 1}, {"a-0": 5}),
        ({"a-0": 5}, {"a-0": 5}),
    ]
    assert OffsetLog(location).read(1).others_end == {"source 1": json.dumps(beats[1])}


def test_sources_that_are_not_kafka(write: Write) -> None:
    """Other sources have their own offsets, which only the location's batches know. They start with none."""
    files = [json.dumps({"logOffset": n}) for n in range(2)]
    location = write(
        {0: ["-", files[0]], 1: [{"a": {"0": 5}}, files[0]], 2: [{"a": {"0": 5}}, files[1]]}, [{"a": {"0": 1}}]
    )
    batches = [OffsetLog(location).read(batch) for batch in range(3)]
    assert [batch.others_start for batch in batches] == [{}, *[{"source 1": files[0]}] * 2]
    assert [batch.others_end["source 1"] for batch in batches] == [files[0], *files]
    assert [(batch.start, batch.end) for batch in batches] == [
        ({"a-0": 1}, {}),
        ({"a-0": 1}, {"a-0": 5}),
        ({"a-0": 5},) * 2,
    ]
    assert others_of(to_json(batches[2].end, batches[2].others_end)) == batches[2].others_end
    check_continues(batches[2], {"a-0": 5}, batches[1].others_end)
    for other in ({}, batches[2].others_end, {"source 0": files[0]}):
        with pytest.raises(BatchMismatch, match="of source"):
            check_continues(batches[2], {"a-0": 5}, other)


def test_one_of_two_topics_was_created_again(tmp_path: Path) -> None:
    """With the permission, its partitions start at their beginning, and the other topic where the checkpoint ended."""
    servers = MemoryServers({"job.name": "totals", "stores.totals.type": "rocksdb"})
    with contextlib.closing(servers):
        servers.open()
        for topic in ("orders", "prices"):
            servers.broker.create(topic, 2)
        config, by_key = servers.on_disk(servers.config, "driver"), Partitioning(("key",), by_key=True)
        with servers.manager(config, "spark-hash(string)") as manager:
            epoch, task = manager.acquire(), task_name(0)
            with open_attempt(config, task, None, epoch) as attempt:
                prepared = attempt.prepare({"orders-0": 5, "orders-1": 6, "prices-0": 7, "prices-1": 8})
            ids = manager.job_inputs(epoch).asked(prepared.input_offsets)()
            manager.publish([replace(prepared, input_topic_ids=ids)])
        servers.broker.delete("prices")
        servers.broker.create("prices", 2)
        with servers.manager(config, "spark-hash(string)") as manager:
            epoch = manager.acquire(allow_skipped_input=True)
            plan = Plan(config, by_key, Bound(no_rows), StructType(), _same, _same, lambda rows, sequence: None)
            found = json.loads(Driver(plan, manager, epoch).starting_offsets())
    assert found == {"orders": {"0": 5, "1": 6}, "prices": {"0": -2, "1": -2}}


def _same(rows: Any) -> Any:
    return rows


def no_rows(batches: object, stores: object, context: object) -> Iterator[Any]:
    """Yield nothing."""
    yield from ()


def test_a_later_batch_starts_where_the_one_before_ended(write: Write) -> None:
    """A source without data in the previous batch starts at its initial offsets."""
    location = write(
        {3: [{"a": {"0": 5}}, "-"], 4: [{"a": {"0": 6, "1": 2}}, {"b": {"0": 4}}]}, [{"a": {"0": 0}}, {"b": {"0": 1}}]
    )
    batch = OffsetLog(location).read(4)
    assert batch.start == {"a-0": 5, "b-0": 1}
    assert batch.end == {"a-0": 6, "a-1": 2, "b-0": 4}
    assert batch.watermark_ms is None


def test_the_last_batch_is_remembered(write: Write, tmp_path: Path) -> None:
    """The next batch needs only its own record. Any other batch is read together with its predecessor."""
    log = OffsetLog(write({0: [{"a": {"0": 1}}], 1: [{"a": {"0": 2}}], 2: [{"a": {"0": 3}}]}))
    assert log.read(1).start == {"a-0": 1}
    (tmp_path / "offsets" / "0").unlink()
    (tmp_path / "offsets" / "1").unlink()
    assert log.read(2).start == {"a-0": 2}
    with pytest.raises(InvalidError, match="no record"):
        OffsetLog(log.location).read(2)


@pytest.mark.parametrize(
    ("ends", "version", "message"),
    [
        ({0: [{"a": {"0": 1}}, {"a": {"1": 1}}]}, "v1", "same topic"),
        ({0: [{"a": {"0": 1}}]}, "v2", "format 'v2'"),
        ({1: [{"a": {"0": 1}}]}, "v1", "no record"),
    ],
)
def test_locations_that_cannot_be_understood(
    write: Write, ends: Mapping[int, Sequence[object]], version: str, message: str
) -> None:
    """A topic with two sources, an unknown format and a missing batch raise InvalidError with a hint."""
    with pytest.raises(InvalidError, match=message) as caught:
        OffsetLog(write(ends, version=version)).read(0)
    assert caught.value.hint


def test_a_damaged_location(tmp_path: Path) -> None:
    """Metadata that is not JSON is an error and not a new location."""
    (tmp_path / "metadata").write_text("{")
    with pytest.raises(CorruptRecord):
        Location(None, tmp_path.as_uri()).query_id()  # type: ignore[arg-type]
    assert Location(None, (tmp_path / "new").as_uri()).query_id() is None  # type: ignore[arg-type]


def test_a_location_is_what_spark_takes_it_for(tmp_path: Path) -> None:
    """Spark takes a path literally, so a space is a space and %20 is %20."""
    for name in ("with space", "with%20percent", "with#hash?and"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "metadata").write_text(json.dumps({"id": name}))
        for uri in (f"file://{directory}", f"file:{directory}/"):
            assert Location(None, uri).query_id() == name  # type: ignore[arg-type]


def test_offsets_as_json_are_normalised() -> None:
    """Equal offsets give equal text, whatever their order. Topic names may contain dashes."""
    one = flatten(['{"b-x":{"1":2,"0":1},"a":{"0":3}}'])
    assert one == {"b-x-1": 2, "b-x-0": 1, "a-0": 3}
    assert to_json(one) == to_json(dict(reversed(one.items()))) == '{"a":{"0":3},"b-x":{"0":1,"1":2}}'


def test_starting_offsets_for_several_sources_and_new_partitions() -> None:
    """Each source takes its own topics. New partitions start at their earliest record."""
    both = StartingOffsets.of({"a-0": 3, "b-0": 4})
    assert both.for_topics("a") == '{"a":{"0":3}}'
    assert both.for_topics("c") == "earliest"
    assert both.including("a-1", "a-0").for_topics("a") == '{"a":{"0":3,"1":-2}}'
    assert StartingOffsets.of({}).including("a-1") == "earliest"


@pytest.mark.parametrize(
    ("batch_id", "start", "checkpoint"),
    [
        (0, {"a-0": 0}, None),
        (0, {"a-0": 5}, {"a-0": 5}),
        (0, {"a-0": 5, "a-1": 0}, {"a-0": 5}),
        (7, {"a-0": 5, "a-1": 2}, {"a-0": 5, "a-1": 2}),
    ],
)
def test_batches_that_continue(batch_id: int, start: dict[str, int], checkpoint: dict[str, int] | None) -> None:
    """These batches are a job's first, start where the checkpoint ended, or have new partitions at a new location."""
    check_continues(BatchInput(batch_id, start, {}, 0, None), checkpoint, {})


@pytest.mark.parametrize(
    ("batch_id", "start", "checkpoint", "message"),
    [
        (3, {"a-0": 5}, None, "has nothing"),
        (0, {"a-0": 4}, {"a-0": 5}, "counted twice"),
        (0, {"a-0": 6}, {"a-0": 5}, "would be lost"),
        (0, {"a-0": 5}, {"a-0": 5, "a-1": 1}, "starts at nothing"),
        (0, {"a-0": 5}, {"a-0": 5, "b-x-0": 1, "b-x-1": 1}, "no longer reads the topic b-x"),
        (4, {"a-0": 5, "a-1": 0}, {"a-0": 5}, "the checkpoint is at nothing"),
    ],
)
def test_batches_that_do_not_continue(
    batch_id: int, start: dict[str, int], checkpoint: dict[str, int] | None, message: str
) -> None:
    """A gap, an overlap and a partition that is missing or unexpected are refused."""
    with pytest.raises(BatchMismatch, match=message):
        check_continues(BatchInput(batch_id, start, {}, 0, None), checkpoint, {})


def test_an_input_that_may_leave_out_topics() -> None:
    """The permission is for whole topics only, and holds until a batch is published."""
    checkpoint = {"a-0": 5, "a-1": 6, "b-0": 1}
    for batch_id in (0, 1):
        check_continues(BatchInput(batch_id, {"a-0": 5, "a-1": 6}, {}, 0, None), checkpoint, {}, allow_skipped=True)
    for start in ({"a-0": 5}, {"a-0": 5, "a-1": 7}):
        with pytest.raises(BatchMismatch, match="batch 0 starts at"):
            check_continues(BatchInput(0, start, {}, 0, None), checkpoint, {}, allow_skipped=True)


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ("Set(a-0, a-1, b-x-0, b-x-1)", "that the checkpoint does not know.*including"),
        ("Set(a-0, a-1)", "does not read all partitions.*for_topics.*allow_skipped_input"),
        ("Set(c-0)", "does not read all partitions"),
    ],
)
def test_starting_offsets_of_other_partitions(assigned: str, message: str) -> None:
    """Spark names both sets. Which of them has more says what the user has to do."""
    text = (
        "assertion failed: If startingOffsets contains specific offsets, you must specify all TopicPartitions.\n"
        "Use -1 for latest, -2 for earliest, if you don't care.\n"
        f"Specified: Set(a-0, a-1, b-x-0) Assigned: {assigned} SQLSTATE: XXKST"
    )
    with pytest.raises(InvalidError, match=message):
        raise other_partitions(text)
