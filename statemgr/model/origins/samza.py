"""Checkpoints and changelogs of Apache Samza.

The format is that of Samza 1.8.0. ``KafkaUtil`` names the checkpoint topic, ``KafkaCheckpointLogKeySerde`` writes the
keys of its records, and ``CheckpointV1Serde`` and ``CheckpointV2Serde`` write the values: JSON. A checkpoint has the
offset of the *last* record that the task has processed of each input partition. Version 2 also names, by state
backend and store, the newest offset of the changelog (``KafkaStateCheckpointMarker``) or the index blob of a snapshot.
Version 1 has only the changelogs' offsets (``KafkaChangelogSSPOffset``), without the names of the stores. Samza writes
both versions at each commit, unless ``task.checkpoint.write.versions`` says otherwise.

The records of a changelog have the plain serialized key and value (``LoggedStore``). Changes after the offset in the
checkpoint are not committed: Samza takes them back when it restores (``TransactionalStateTaskRestoreManager``). Samza
gives the changelog of a store with a time to live the policy ``delete`` (``KafkaConfig``). A task's partition of its
changelogs has not always the task's number: ``JobModelCalculator`` counts the tasks in the order of their names, in
which ``Partition 10`` comes before ``Partition 2``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from statemgr.errors import CorruptRecord, InvalidError, StatemgrError
from statemgr.model.origins.origin import Decoder, OldCheckpoints, OldRecord, Place

_BACKENDS = "org.apache.samza.storage"
_CHANGELOG = f"{_BACKENDS}.KafkaChangelogStateBackendFactory"
_BLOBS = f"{_BACKENDS}.blobstore.BlobStoreStateBackendFactory"
#: Version → the type in a record's key.
_TYPES = {"checkpoint": 1, "checkpoint-v2": 2}
#: Task names of the grouper that gives task N the partitions N.
_TASK = re.compile(r"Partition (0|[1-9]\d{0,5})\Z")
#: What Samza puts between the job's name and ID and the rest of the name of a stream that it writes for itself.
_INTERNAL = re.compile(r"-[^-]+-(partition_by|broadcast|join|merge|window)-")


class Samza:
    """Implements :class:`statemgr.model.origins.CheckpointingOrigin`."""

    name = "samza"
    title = "Apache Samza"
    leaves_out_uncommitted = False

    def store(self, topic: str, job: str) -> str | None:
        """None: the checkpoints say which topics are the changelogs."""
        return None

    def problem(self, topic: str, settings: Mapping[str, str]) -> str | None:
        if "delete" in settings.get("cleanup.policy", ""):
            return (
                f"its cleanup.policy is {settings['cleanup.policy']}, so it is that of a store with a time to live "
                "(rocksdb.ttl.ms), whose old keys Kafka deletes by itself"
            )
        return None

    def is_internal(self, topic: str, job: str) -> bool:
        return topic.startswith(job) and _INTERNAL.match(topic.removeprefix(job)) is not None

    def decoder(self, topic: str, committed: Mapping[str, int]) -> Decoder | None:
        return None

    def checkpoint_topic(self, job: str) -> str:
        """That of a job whose ``job.id`` is 1, its default."""
        return f"__samza_checkpoint_ver_1_for_{job.replace('_', '-')}_1"

    def checkpoints(self, records: Iterable[OldRecord]) -> OldCheckpoints:
        newest: dict[int, dict[int, _Checkpoint]] = {}
        # older records of a key may be those of another grouper, or broken
        for record in {record.key: record for record in records}.values():
            try:
                read = _read(record)
            except StatemgrError as error:
                raise error.with_where(offset=record.offset) from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise CorruptRecord("the record is not a checkpoint of Samza", offset=record.offset) from None
            if read is not None:
                newest.setdefault(read.task, {})[read.version] = read
        return _united([_chosen(versions) for _, versions in sorted(newest.items())])


@dataclass(frozen=True)
class _Checkpoint:
    """A decoded record. ``places``: store, or topic in version 1 → where its changes end; ``snapshots``: store → index
    blob."""

    version: int
    task: int
    record: int
    made_ms: int
    offsets: Mapping[str, int]
    places: Mapping[str, Place]
    snapshots: Mapping[str, str]


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


def _read(record: OldRecord) -> _Checkpoint | None:
    """A checkpoint; None for a record of another type, and for a tombstone."""
    key = json.loads(record.key)
    version = _TYPES.get(key["type"])
    if version is None or record.value is None:
        return None
    named = _TASK.match(key["taskName"])
    if named is None:
        raise InvalidError(
            f"the old job has the task {key['taskName']!r}, so it does not group its input by partition "
            f"({key['systemstreampartition-grouper-factory']})",
            hint="only jobs whose task N reads the partitions N of its input can be adopted",
        )
    content = json.loads(record.value)
    return (_version_1 if version == 1 else _version_2)(content, int(named[1]), record.offset)


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
