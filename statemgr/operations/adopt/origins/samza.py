"""Checkpoints and changelogs of Apache Samza.

The format is that of Samza 1.8.0; 1.7.0, which brought version 2 of the checkpoints, writes the same. ``KafkaUtil``
names the checkpoint topic, ``KafkaCheckpointLogKeySerde`` writes the keys of its records, and ``CheckpointV1Serde`` and
``CheckpointV2Serde`` write the values: JSON. A checkpoint has the offset of the *last* record that the task has
processed of each input partition. Version 2 also names, by state backend and store, the newest offset of the changelog
(``KafkaStateCheckpointMarker``) or the index blob of a snapshot. Version 1 has only the changelogs' offsets
(``KafkaChangelogSSPOffset``), without the names of the stores. Samza writes both versions at each commit, unless
``task.checkpoint.write.versions`` says otherwise.

The records of a changelog have the plain serialized key and value (``LoggedStore``). Changes after the offset in the
checkpoint are not committed: Samza takes them back when it restores (``TransactionalStateTaskRestoreManager``). Samza
gives the changelog of a store with a time to live the policy ``delete``, and that time as its retention
(``KafkaConfig``); a record has no expiry, but the time at which it was written. A task's partition of its changelogs
has not always the task's number: ``JobModelCalculator`` counts the tasks in the order of their names, in which
``Partition 10`` comes before ``Partition 2``. Checkpoints name neither side inputs nor stores without a changelog.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from statemgr.errors import CorruptRecord, InvalidError, StatemgrError
from statemgr.model.commit import Change
from statemgr.model.keys.partitioners import HASHES
from statemgr.operations.adopt.origins.kind import PLAIN, Hint, Kind, OldRecord, kafka_deletes
from statemgr.operations.adopt.origins.origin import OldCheckpoints, Place

_BACKENDS = "org.apache.samza.storage"
_CHANGELOG = f"{_BACKENDS}.KafkaChangelogStateBackendFactory"
_BLOBS = f"{_BACKENDS}.blobstore.BlobStoreStateBackendFactory"
#: Version → the type in a record's key.
_TYPES = {"checkpoint": 1, "checkpoint-v2": 2}
#: The version of a marker of a changelog (``KafkaStateCheckpointMarker``).
_MARKER = 1
#: Task names of the grouper that gives task N the partitions N (``GroupByPartitionFactory``), and of the one that makes
#: a task of each partition (``GroupBySystemStreamPartitionFactory``): with one input topic, that is the same.
_TASK = re.compile(r"Partition (0|[1-9]\d{0,5})\Z")
_TASK_OF_TOPIC = re.compile(r"SystemStreamPartition \[[^,]+, ([^,]+), (0|[1-9]\d{0,5})\]\Z")
#: What Samza puts between the job's name and ID and the rest of the name of a stream that it writes for itself.
_INTERNAL = re.compile(r"-[^-]+-(partition_by|broadcast|join|merge|window)-")


def _plain(record: OldRecord) -> Change:
    return record.key, record.value


#: A store with ``rocksdb.ttl.ms``.
EXPIRING = Kind(
    name="ttl",
    title="entries that expire",
    decoder=lambda committed: _plain,
    time_ms=lambda record: record.timestamp_ms,
    left_behind="entries that Kafka has deleted from the changelog. The records have no expiry: with "
    "stores.<name>.ttl.ms, an entry lives that long from the time of its record, and without it for ever",
)


class Samza:
    """Implements :class:`statemgr.operations.adopt.origins.CheckpointingOrigin`."""

    name = "samza"
    title = "Apache Samza"
    producers = HASHES
    leaves_out_uncommitted = False
    tables_without_changelog = False
    kinds: Mapping[str, Kind] = {PLAIN.name: PLAIN, EXPIRING.name: EXPIRING}

    def store(self, topic: str, job: str) -> str | None:
        """None: the checkpoints say which topics are the changelogs."""
        return None

    def other_jobs(self, topic: str, job: str) -> list[str]:
        return []

    def hint(self, topic: str, settings: Mapping[str, str], own_settings: Mapping[str, str]) -> Hint | None:
        deleted = kafka_deletes(settings)
        if deleted is None:
            return None
        return Hint((EXPIRING.name,), f"{deleted.why}, as that of a store with rocksdb.ttl.ms", certain=True)

    def is_internal(self, topic: str, job: str) -> bool:
        return topic.startswith(job) and _INTERNAL.match(topic.removeprefix(job)) is not None

    def checkpoint_topic(self, job: str) -> str:
        """That of a job whose ``job.id`` is 1, its default."""
        return f"__samza_checkpoint_ver_1_for_{job.replace('_', '-')}_1"

    def checkpoints(self, records: Iterable[OldRecord]) -> OldCheckpoints:
        newest: dict[int, dict[int, _Checkpoint]] = {}
        groups = set[str]()
        # older records of a key may be those of another grouper, or broken
        for record in {record.key: record for record in records}.values():
            try:
                read = _read(record)
            except StatemgrError as error:
                raise error.with_where(offset=record.offset) from None
            except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
                raise CorruptRecord("the record is not a checkpoint of Samza", offset=record.offset) from None
            if read is not None:
                newest.setdefault(read.task, {})[read.version] = read
                groups.add(read.group)
        if len(groups) > 1:
            raise InvalidError(
                "the old job's checkpoints are those of several groupers, or of one that makes a task of each "
                f"partition of several topics: {', '.join(sorted(groups))}",
                hint="only jobs whose task N reads the partitions N of its input can be adopted",
            )
        return _united([_chosen(versions) for _, versions in sorted(newest.items())])


@dataclass(frozen=True)
class _Checkpoint:
    """A decoded record.

    Attributes:
        places: store, or topic in version 1 → where its changes end.
        snapshots: store → index blob.
        group: which tasks belong together: the input topic of its tasks, or the grouper if that is not in their names.
    """

    version: int
    task: int
    record: int
    made_ms: int
    offsets: Mapping[str, int]
    places: Mapping[str, Place]
    snapshots: Mapping[str, str]
    group: str = ""


def _chosen(versions: Mapping[int, _Checkpoint]) -> _Checkpoint:
    """Version 2, unless version 1 is of a later commit, which older software has made."""
    one, two = versions.get(1), versions.get(2)
    if one is None or two is None:
        found = two or one
        assert found is not None
        return found
    return one if one.record > two.record and one.offsets != two.offsets else two


def _united(checkpoints: list[_Checkpoint]) -> OldCheckpoints:
    tasks = [checkpoint.task for checkpoint in checkpoints]
    if tasks != list(range(len(tasks))):
        missing = min(set(range(len(tasks))) - set(tasks))
        raise InvalidError(
            f"the checkpoint topic has checkpoints of {len(tasks)} tasks, but none of Partition {missing}",
            hint="let the old job commit every task once, then stop it",
        )
    offsets: dict[str, int] = {}
    for checkpoint in checkpoints:
        offsets |= checkpoint.offsets
    return OldCheckpoints(
        len(tasks),
        offsets,
        {(name, one.task): place for one in checkpoints if one.version == 2 for name, place in one.places.items()},
        {(place.topic, one.task): place for one in checkpoints for place in one.places.values()},
        {(name, one.task): blob for one in checkpoints for name, blob in one.snapshots.items()},
        tuple(checkpoint.made_ms for checkpoint in checkpoints),
    )


def task_of(name: str) -> tuple[int, str] | None:
    """The number of a task, and its input topic if that is in its name; None for another grouper's task."""
    if named := _TASK.match(name):
        return int(named[1]), ""
    named = _TASK_OF_TOPIC.match(name)
    return (int(named[2]), named[1]) if named else None


def _read(record: OldRecord) -> _Checkpoint | None:
    """A checkpoint; None for a record of another type, and for a tombstone."""
    key = json.loads(record.key)
    version, grouper = _TYPES.get(key["type"]), key["systemstreampartition-grouper-factory"]
    if record.value is None or (version is None and not key["type"].startswith("checkpoint")):
        return None
    if version is None:
        raise InvalidError(
            f"the old job writes checkpoints of an unknown version, {key['type']!r}",
            hint="the versions checkpoint and checkpoint-v2 are known: let the old job commit once with one of them "
            "(task.checkpoint.write.versions), and delete the other records",
        )
    task = task_of(key["taskName"])
    if task is None:
        raise InvalidError(
            f"the old job has the task {key['taskName']!r}, so it does not group its input by partition ({grouper})",
            hint="only jobs whose task N reads the partitions N of its input can be adopted",
        )
    number, topic = task
    content = json.loads(record.value)
    found = (_version_1 if version == 1 else _version_2)(content, number, record.offset)
    # the clock of the old job may have been ahead of the broker's
    made_ms = min(found.made_ms, record.timestamp_ms) if record.timestamp_ms > 0 else found.made_ms
    return replace(found, group=topic or grouper, made_ms=made_ms)


def _version_1(content: Mapping[str, Mapping[str, str]], task: int, record: int) -> _Checkpoint:
    offsets: dict[str, int] = {}
    places: dict[str, Place] = {}
    made_ms = 0
    for one in content.values():
        topic, partition, offset = one["stream"], int(one["partition"]), one["offset"]
        checkpoint_id, colon, newest = (offset or "").partition(":")
        if colon:
            made_ms = _millis(checkpoint_id)
            places[topic] = Place(topic, partition, 0 if newest == "null" else int(newest) + 1)
        elif offset is not None:
            _add(offsets, topic, partition, offset, task)
    return _Checkpoint(1, task, record, made_ms, offsets, places, {})


def _version_2(content: Mapping[str, Any], task: int, record: int) -> _Checkpoint:
    offsets: dict[str, int] = {}
    for source, offset in content["input-offsets"].items():
        topic, _, partition = source.partition(".")[2].rpartition(".")
        if offset is not None:
            _add(offsets, topic, int(partition), offset, task)
    markers = content["state-checkpoint-markers"]
    for backend in markers.keys() - {_CHANGELOG, _BLOBS}:
        raise InvalidError(
            f"the old job keeps state in a backend of its own, {backend}",
            hint=f"let the old job commit with {_CHANGELOG} once, then stop it",
        )
    places = {store: _place(json.loads(marker)) for store, marker in markers.get(_CHANGELOG, {}).items()}
    made_ms = _millis(content["checkpoint-id"])
    return _Checkpoint(2, task, record, made_ms, offsets, places, dict(markers.get(_BLOBS, {})))


def _place(marker: Mapping[str, Any]) -> Place:
    if marker.get("version", _MARKER) != _MARKER:
        raise InvalidError(
            f"the old job's checkpoint has a changelog marker of version {marker['version']}, which is unknown",
            hint=f"version {_MARKER} is known, which Samza writes up to 1.8: let such a Samza commit once",
        )
    of, newest = marker["changelog-ssp"], marker["changelog-offset"]
    return Place(of["stream"], int(of["partition"]), 0 if newest is None else int(newest) + 1)


def _millis(checkpoint_id: str) -> int:
    """When a checkpoint was made. Samza does not pad the second part of the ID."""
    return int(checkpoint_id.partition("-")[0])


def _add(offsets: dict[str, int], topic: str, partition: int, last: str, task: int) -> None:
    if partition != task:
        raise InvalidError(
            f"task Partition {task} of the old job reads partition {partition} of {topic}",
            hint="only jobs whose task N reads the partitions N of its input can be adopted",
        )
    if not re.fullmatch(r"\d{1,18}", last):
        raise InvalidError(f"the offset {last!r} of {topic} is not one of Kafka", hint="the input must be in Kafka")
    source = f"{topic}-{partition}"
    if offsets.get(source, int(last) + 1) != int(last) + 1:
        raise InvalidError(
            f"two systems of the old job have a topic {topic}", hint="adopt a job with one Kafka cluster"
        )
    offsets[source] = int(last) + 1
