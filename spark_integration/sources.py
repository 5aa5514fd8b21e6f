"""Reads the input offsets of a batch from Spark's checkpoint location, and compares them with the checkpoint's.

Spark writes the end offsets of batch n to ``<location>/offsets/n`` before it runs the batch. A batch starts where the
one before it ended; the first one starts at ``<location>/sources/<i>/0``. The files are text: a version line, a line of
metadata as JSON, and for every source a line of offsets as JSON (``OffsetSeqLog`` and
``KafkaSourceInitialOffsetWriter`` of Spark 4).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_integration.location import Location
from statemgr.errors import BatchMismatch, CorruptRecord, InvalidError
from statemgr.ids import OTHER_SOURCE, source_topic

#: Source partition (``orders-0``) → offset.
Offsets = Mapping[str, int]
#: ``source 1`` → offset as Spark writes it, for the sources of a query other than Kafka.
Others = Mapping[str, str]

_VOID = "-"
_EARLIEST = -2


class StartingOffsets(str):
    """Spark's ``startingOffsets``: ``earliest`` at the job's first start, later the checkpoint's offsets as JSON.

    In an input with several Kafka sources, give each its own: ``starting_offsets.for_topics("orders")``.
    """

    __slots__ = ()

    @classmethod
    def of(cls, offsets: Offsets) -> StartingOffsets:
        """Make the offsets from a checkpoint's input offsets; ``earliest`` if there are none."""
        return cls(to_json(offsets)) if offsets else cls("earliest")

    def for_topics(self, *topics: str) -> StartingOffsets:
        """Return the offsets of these topics; ``earliest`` if the checkpoint has none of them."""
        return self.of({name: offset for name, offset in self._offsets().items() if source_topic(name) in topics})

    def including(self, *partitions: str) -> StartingOffsets:
        """Add partitions that the checkpoint does not know (``orders-4``), starting at their first record."""
        known = self._offsets()
        return self.of({**dict.fromkeys(partitions, _EARLIEST), **known}) if known else self

    def _offsets(self) -> dict[str, int]:
        return {} if self == "earliest" else flatten([str(self)])


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A batch as Spark planned it: the offsets of every source partition, and times in epoch milliseconds.

    ``others_start`` has a source other than Kafka only if an earlier batch has read it.
    """

    batch_id: int
    start: Offsets
    end: Offsets
    time_ms: int
    watermark_ms: int | None
    others_start: Others = field(default_factory=dict)
    others_end: Others = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no source has anything new."""
        return self.start == self.end and self.others_start == self.others_end


class OffsetLog:
    """Reads Spark's log of batches. Remembers the ends of the last batch, because the next batch starts there.

    ``heartbeat``: the last source of the query is the heartbeat (``heartbeat.py``), which has no offsets of its own.
    """

    def __init__(self, location: Location, *, heartbeat: bool = False) -> None:
        self.location = location
        self._sources = slice(2, -1 if heartbeat else None)
        self._last: tuple[int, list[str]] | None = None

    def read(self, batch_id: int) -> BatchInput:
        """Read a batch. Raises: InvalidError if the location is not one of Spark 4; CorruptRecord."""
        lines = _offset_lines(self.location, batch_id)
        try:
            metadata = json.loads(lines[1])
        except ValueError as error:
            uri = self.location.uri
            raise CorruptRecord("the offset log cannot be read", location=uri, batch=batch_id) from error
        ends = lines[self._sources]
        before = self._ends(batch_id - 1) if batch_id else []
        starts = [before[i] if i < len(before) else _VOID for i in range(len(ends))]
        others = [end != _VOID and _topics(end) is None for end in ends]
        for i, start in enumerate(starts):
            if start == _VOID and not others[i]:
                starts[i] = _initial(self.location, i)
        named = {i: f"{OTHER_SOURCE}{i}" for i, other in enumerate(others) if other}
        self._last = batch_id, ends
        return BatchInput(
            batch_id=batch_id,
            start=flatten(start for start, other in zip(starts, others, strict=True) if not other),
            end=flatten(end for end, other in zip(ends, others, strict=True) if not other),
            time_ms=int(metadata["batchTimestampMs"]),
            watermark_ms=int(metadata["batchWatermarkMs"]) or None,
            others_start={name: starts[i] for i, name in named.items() if starts[i] != _VOID},
            others_end={name: ends[i] for i, name in named.items()},
        )

    def _ends(self, batch_id: int) -> list[str]:
        if self._last is not None and self._last[0] == batch_id:
            return self._last[1]
        return _offset_lines(self.location, batch_id)[self._sources]


def flatten(sources: Iterable[str]) -> dict[str, int]:
    """Turn ``{"orders": {"0": 5}}`` of every source of Kafka into ``{"orders-0": 5}``.

    Raises: InvalidError for offsets that are not Kafka's, and for a topic that two sources read.
    """
    offsets: dict[str, int] = {}
    seen: set[str] = set()
    for text in sources:
        if text == _VOID:
            continue
        topics = _topics(text)
        if topics is None:
            raise InvalidError(f"these are not Kafka's offsets: {text[:100]}")
        twice = seen.intersection(topics)
        if twice:
            raise InvalidError(
                "two sources of the input read the same topic",
                hint="read it once and split it into two afterwards",
                topic=sorted(twice)[0],
            )
        seen.update(topics)
        for topic, partitions in topics.items():
            offsets.update({f"{topic}-{partition}": offset for partition, offset in partitions.items()})
    return offsets


def to_json(offsets: Offsets, others: Others | None = None) -> str:
    """Return Spark's JSON of offsets, normalised so that equal offsets give equal text. It includes other sources."""
    topics: dict[str, Any] = dict(others or {})
    for name, offset in offsets.items():
        topic, _, partition = name.rpartition("-")
        topics.setdefault(topic, {})[partition] = offset
    return json.dumps(topics, sort_keys=True, separators=(",", ":"))


def others_of(batch_offsets: str) -> Others:
    """Return the offsets of sources other than Kafka, from the output of :func:`to_json`."""
    return {name: offset for name, offset in json.loads(batch_offsets).items() if name.startswith(OTHER_SOURCE)}


def check_continues(
    batch: BatchInput, checkpoint: Offsets | None, others: Others, *, allow_skipped: bool = False
) -> None:
    """Check that the batch starts exactly where the checkpoint ended (None: no checkpoint). Raises: BatchMismatch.

    The first batch of a location may have partitions that the checkpoint does not know: they are new. ``others``: the
    ends of the sources other than Kafka. ``allow_skipped``: the input may leave out whole topics of the checkpoint.
    """
    if checkpoint is None:
        if batch.batch_id:
            raise BatchMismatch(
                f"the checkpoint location is at batch {batch.batch_id}, but the checkpoint topic has nothing",
                hint="check the topic and job.name; to start again, use a new location",
                batch=batch.batch_id,
            )
        return
    for name in sorted({*others, *batch.others_start}):
        if others.get(name) != batch.others_start.get(name):
            raise BatchMismatch(
                f"batch {batch.batch_id} starts at {batch.others_start.get(name, 'nothing')} of {name}, the checkpoint "
                f"is at {others.get(name, 'nothing')}",
                hint="use the checkpoint location of the job's last batch",
                batch=batch.batch_id,
            )
    read = {source_topic(name) for name in batch.start}
    unread = sorted(name for name in checkpoint if source_topic(name) not in read)
    if unread and not allow_skipped:
        raise BatchMismatch(
            f"the input no longer reads the topic {source_topic(unread[0])}",
            hint="read it as before; to give up the rows that are left in it, start once with allow_skipped_input=True",
            partition=unread[0],
            batch=batch.batch_id,
        )
    for name in sorted({*checkpoint, *batch.start} - {*unread}):
        has, starts = checkpoint.get(name), batch.start.get(name)
        if has == starts or (has is None and batch.batch_id == 0):
            continue
        loss = "rows between would be lost" if (starts or 0) > (has or 0) else "rows would be counted twice"
        raise BatchMismatch(
            f"batch {batch.batch_id} starts at {_position(starts)}, the checkpoint is at {_position(has)}: {loss}",
            hint="take a new location and the callable form of input, which starts at the checkpoint",
            partition=name,
            batch=batch.batch_id,
        )


def _position(offset: int | None) -> str:
    return "nothing" if offset is None else f"offset {offset}"


def _offset_lines(location: Location, batch_id: int) -> list[str]:
    lines = location.read(f"offsets/{batch_id}")
    if lines is None or len(lines) < 2:
        raise InvalidError(
            "the checkpoint location has no record of the batch's offsets",
            hint="asynchronous progress tracking cannot be used with a stateful query",
            location=location.uri,
            batch=batch_id,
        )
    if lines[0] != "v1":
        raise InvalidError(
            f"the offset log has format {lines[0]!r}; only 'v1' is known",
            hint="leave spark.sql.streaming.offsetLog.formatVersion at 1",
            location=location.uri,
            batch=batch_id,
        )
    return lines


def _initial(location: Location, source: int) -> str:
    lines = location.read(f"sources/{source}/0")
    if lines is None:
        return _VOID  # it is not planned yet
    return lines[-1]


def _topics(text: str) -> dict[str, dict[str, int]] | None:
    """Return the offsets of a Kafka source; None if they belong to another kind of source."""
    try:
        topics = json.loads(text)
    except ValueError:
        return None
    is_kafka = isinstance(topics, dict) and all(
        isinstance(partitions, dict)
        and all(partition.isdigit() and isinstance(offset, int) for partition, offset in partitions.items())
        for partitions in topics.values()
    )
    return topics if is_kafka else None
