"""The checkpoint topic, for reading: the newest record of every task, or every record that is still there.

Reads Kafka only. The bytes of keys and values are the model's codecs' business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from confluent_kafka import Message

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord, MissingState, TopicMisconfigured
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader
from statemgr.model import codec
from statemgr.model.checkpoint import CheckpointKey, CheckpointRecord, with_version_one
from statemgr.model.codec_wire import HEADER_SIZE, MARK
from statemgr.model.schemas import shipped_schemas
from statemgr.ports import Clock

_PARTITION = 0
_VERSIONS = (1, 2)


@dataclass(frozen=True, slots=True)
class _Found:
    """The value of one record of this job, not decoded yet."""

    key: CheckpointKey
    value: bytes
    offset: int


class CheckpointTopic:
    """Implements :class:`statemgr.ports.CheckpointLog`.

    Args:
        stall_s: seconds without progress after which reading fails (see :class:`PartitionReader`).
    """

    def __init__(self, config: JobConfig, clock: Clock, *, stall_s: float | None = None) -> None:
        self._config = config
        self._topic = config.checkpoint_topic
        self._metadata = TopicMetadata(config)
        self._reader = PartitionReader(config, clock, stall_s)

    def read(self, tasks: Collection[str] | None = None) -> Mapping[str, CheckpointRecord]:
        """See :meth:`statemgr.ports.CheckpointLog.read`. Checks every record of the job, decodes the newest.

        Raises: CorruptRecord, UnavailableError, AccessDenied, MissingState (there is no such topic),
            TopicMisconfigured (it has more than one partition).
        """
        newest: dict[CheckpointKey, _Found] = {}
        for found in self._records():
            newest[found.key] = found
        versions = self._config.read_versions
        generation = max((key.layout_generation for key in newest if key.record_version in versions), default=0)
        wanted = {
            key.task for key in newest if key.layout_generation == generation and (tasks is None or key.task in tasks)
        }
        records = {}
        for task in sorted(wanted):
            keys = {version: self._key(generation, task, version) for version in versions}
            of_version = {v: self._decode(newest[key]) for v, key in keys.items() if key in newest}
            record = with_version_one(of_version.get(2), of_version.get(1))
            if record is not None:
                records[task] = record
        return records

    def history(self) -> Iterator[CheckpointRecord]:
        """Every committed record of the job that is still there, oldest first. Raises: as :meth:`read`."""
        for found in self._records():
            yield self._decode(found)

    def was_truncated(self) -> bool:
        """See :meth:`statemgr.ports.CheckpointLog.was_truncated`. Compaction never moves the first offset."""
        return self._metadata.bounds(self._topic, _PARTITION)[0] > 0

    def close(self) -> None:
        """Let go of the clients."""
        self._metadata.close()

    def _records(self) -> Iterator[_Found]:
        self._check_topic()
        start, end = self._metadata.bounds(self._topic, _PARTITION)
        for batch in self._reader.read(self._topic, _PARTITION, start, end):
            for message in batch:
                found = self._checked(message)
                if found is not None:
                    yield found

    def _check_topic(self) -> None:
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

    def _checked(self, message: Message) -> _Found | None:
        """A record of this job, by its key and its value's fingerprint; None for another job's."""
        offset, data, value = message.offset(), message.key(), message.value()
        assert offset is not None
        if data is None:
            raise self._corrupt("it has no key", offset)
        key = codec.decode_key(data, topic=self._topic, partition=_PARTITION, offset=offset)
        if (key.job_name, key.job_id) != (self._config.job_name, self._config.job_id):
            return None
        if value is None:
            raise self._corrupt(f"it deletes the checkpoint of {key.task}, which nothing here does", offset)
        found = _Found(key, value, offset)
        if key.record_version not in _VERSIONS or not _is_known(key, value):
            self._decode(found)
            raise self._corrupt("its schema is unknown", offset)
        return found

    def _decode(self, found: _Found) -> CheckpointRecord:
        return codec.decode_record(found.key, found.value, found.offset, topic=self._topic, partition=_PARTITION)

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
