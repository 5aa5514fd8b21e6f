"""The checkpoint topic, for reading: the newest record of every task, or every record that is still there.

Reads Kafka only. The bytes of keys and values are the model's codecs' business.

A topic may hold millions of records of which compaction will leave a few: each one's key and fingerprint are checked,
but only the newest of each key is kept and, when it is asked for, decoded. What was read is not read again: the next
read goes on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from confluent_kafka import Message

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord, MissingState, TopicMisconfigured
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.model import codec
from statemgr.model.checkpoint import CheckpointKey, CheckpointRecord, with_version_one
from statemgr.model.codec_wire import HEADER_SIZE, MARK
from statemgr.model.schemas import shipped_schemas
from statemgr.ports import Clock

_PARTITION = 0
_VERSIONS = (1, 2)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where the topic begins and ends."""

    topic_id: str
    start: int
    end: int


@dataclass(slots=True)
class _Seen:
    """What was read: everything of the job below ``position``. Message objects are kept as they are: made by the
    million, they need nothing made of them until their key is asked for."""

    bounds: _Bounds
    position: int
    newest: dict[bytes, Message] = field(default_factory=dict)
    decoded: dict[bytes, CheckpointRecord] = field(default_factory=dict)

    def continues(self, bounds: _Bounds, position: int) -> bool:
        """Whether the topic with these bounds still has what was read, up to ``position`` when it was asked for them.

        Compaction never moves its beginning, and its end only grows: otherwise it was truncated or made anew.
        """
        was = self.bounds
        return (was.topic_id, was.start) == (bounds.topic_id, bounds.start) and position <= bounds.end


class CheckpointTopic:
    """Implements :class:`statemgr.ports.CheckpointLog`. Safe to use from many threads.

    Args:
        stall_s: seconds without progress after which reading fails (see :class:`PartitionReader`).
    """

    def __init__(self, config: JobConfig, clock: Clock, *, stall_s: float | None = None) -> None:
        self._config = config
        self._topic = config.checkpoint_topic
        self._metadata = TopicMetadata(config)
        self._reader = PartitionReader(config, clock, stall_s)
        self._lock = threading.Lock()
        self._seen: _Seen | None = None
        #: Keys that were decoded; None is another job's.
        self._keys: dict[bytes, CheckpointKey | None] = {}
        #: The first bytes of values that a key's records may have, None for another job's. Filled as they are met.
        self._headers: dict[bytes, set[bytes] | None] = {}
        self._headers_of: dict[int, set[bytes]] = {version: set() for version in _VERSIONS}

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False
    ) -> Mapping[str, CheckpointRecord]:
        """See :meth:`statemgr.ports.CheckpointLog.read`. Checks every record of the job, decodes the newest.

        Raises: CorruptRecord, UnavailableError, AccessDenied, MissingState (there is no such topic),
            TopicMisconfigured (it has more than one partition).
        """
        # asked before waiting for another thread's turn, which may well bring what this one needs
        position = self._seen.position if self._seen is not None else 0
        bounds = self._bounds(only_settled)
        with self._lock:
            seen = self._read_to(bounds, position)
            return self._newest_of(seen, tasks)

    def history(self) -> Iterator[CheckpointRecord]:
        """Every committed record of the job that is still there, oldest first. Raises: as :meth:`read`."""
        bounds = self._bounds()
        for batch in self._reader.read(self._topic, _PARTITION, bounds.start, bounds.end):
            for message in batch:
                with self._lock:
                    ours = self._headers_for(message)
                    if ours is not None:
                        self._check(message, ours)
                if ours is not None:
                    yield self._decode(message)

    def was_truncated(self) -> bool:
        """See :meth:`statemgr.ports.CheckpointLog.was_truncated`. Compaction never moves the first offset."""
        return self._metadata.bounds(self._topic, _PARTITION)[0] > 0

    def close(self) -> None:
        """Let go of the clients."""
        self._metadata.close()

    # --- reading ------------------------------------------------------------------------------------------------

    def _bounds(self, only_settled: bool = False) -> _Bounds:
        """Where the topic begins and ends now. Raises: MissingState, TopicMisconfigured, UnavailableError."""
        found = self._metadata.describe([self._topic]).get(self._topic)
        if found is None:
            raise MissingState(
                "the checkpoint topic does not exist",
                hint="check kafka.bootstrap.servers and task.checkpoint.topic; "
                "only for a new job: `statemgr topics create`",
                topic=self._topic,
            )
        if len(found.partitions) != 1:
            raise TopicMisconfigured(
                f"the checkpoint topic has {len(found.partitions)} partitions and must have 1",
                hint="set task.checkpoint.topic to a new topic, or delete this one if it is none of yours",
                topic=self._topic,
            )
        start, end = self._metadata.bounds(self._topic, _PARTITION, only_settled=only_settled)
        return _Bounds(str(found.topic_id), start, end)

    def _read_to(self, bounds: _Bounds, position: int) -> _Seen:
        seen = self._seen
        if seen is None or not seen.continues(bounds, position):
            seen = self._seen = _Seen(bounds, bounds.start)
        newest, headers = seen.newest, self._headers
        for batch in self._reader.read(self._topic, _PARTITION, seen.position, bounds.end):
            for message in batch:
                # a million times: as few calls as can be
                key, value = message.key(), message.value()
                try:
                    expected = headers[key]  # type: ignore[index]
                except KeyError:
                    expected = self._headers_for(message)
                if expected is None:
                    continue
                if value is None or value[:HEADER_SIZE] not in expected:
                    self._check(message, expected)
                newest[key] = message  # type: ignore[index]
            seen.position = offset_of(batch[-1]) + 1
        seen.position = max(seen.position, bounds.end)
        return seen

    def _newest_of(self, seen: _Seen, tasks: Collection[str] | None) -> dict[str, CheckpointRecord]:
        versions = self._config.read_versions
        by_key = {key: data for data in seen.newest if (key := self._keys[data]) is not None}
        generation = max((key.layout_generation for key in by_key if key.record_version in versions), default=0)
        wanted = {
            key.task for key in by_key if key.layout_generation == generation and (tasks is None or key.task in tasks)
        }
        records = {}
        for task in sorted(wanted):
            keys = {version: self._key(generation, task, version) for version in versions}
            of_version = {v: self._decoded(seen, by_key[key]) for v, key in keys.items() if key in by_key}
            record = with_version_one(of_version.get(2), of_version.get(1))
            if record is not None:
                records[task] = record
        return records

    def _decoded(self, seen: _Seen, key: bytes) -> CheckpointRecord:
        message = seen.newest[key]
        record = seen.decoded.get(key)
        if record is None or record.offset != message.offset():
            record = seen.decoded[key] = self._decode(message)
        return record

    # --- one record ---------------------------------------------------------------------------------------------

    def _headers_for(self, message: Message) -> set[bytes] | None:
        """The headers met in records of this version; None when the record is another job's."""
        data, offset = message.key(), offset_of(message)
        if data is None:
            raise self._corrupt("it has no key", offset)
        if data not in self._headers:
            key = codec.decode_key(data, topic=self._topic, partition=_PARTITION, offset=offset)
            ours = (key.job_name, key.job_id) == (self._config.job_name, self._config.job_id)
            self._keys[data] = key if ours else None
            self._headers[data] = self._headers_of.setdefault(key.record_version, set()) if ours else None
        return self._headers[data]

    def _check(self, message: Message, headers: set[bytes]) -> None:
        """Raises: CorruptRecord unless the value has the fingerprint of a known schema, which is then remembered."""
        data, value, offset = message.key(), message.value(), offset_of(message)
        assert data is not None
        key = self._keys[data]
        assert key is not None
        if value is None:
            raise self._corrupt(f"it deletes the checkpoint of {key.task}, which nothing here does", offset)
        if key.record_version not in _VERSIONS or not _is_known(key, value):
            self._decode(message)
            raise self._corrupt("its schema is unknown", offset)
        headers.add(value[:HEADER_SIZE])

    def _decode(self, message: Message) -> CheckpointRecord:
        data, value = message.key(), message.value()
        assert data is not None
        assert value is not None
        key = self._keys[data]
        assert key is not None
        return codec.decode_record(key, value, offset_of(message), topic=self._topic, partition=_PARTITION)

    def _key(self, generation: int, task: str, version: int) -> CheckpointKey:
        return CheckpointKey(self._config.job_name, self._config.job_id, generation, task, version)

    def _corrupt(self, why: str, offset: int) -> CorruptRecord:
        return CorruptRecord(
            f"checkpoint record refused: {why}",
            hint="nobody but statemgr may write to the checkpoint topic: look who does",
            topic=self._topic,
            partition=_PARTITION,
            offset=offset,
        )


def _is_known(key: CheckpointKey, value: bytes) -> bool:
    reader = f"checkpoint.v{key.record_version}"
    return value.startswith(MARK) and shipped_schemas().writer_of(value[len(MARK) : HEADER_SIZE], reader) is not None
