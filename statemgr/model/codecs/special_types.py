"""Types that are written in another form, and rules that no schema can express, for the generic codec. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from statemgr.ids import CheckpointId
from statemgr.model.chain import ChainSegment
from statemgr.model.checkpoint import Attachment, BlobMarker, BlobRef, ChangelogMarker
from statemgr.model.checkpoint_records import Inputs, TaskCheckpoint
from statemgr.model.codecs.generic import Form, Shapes
from statemgr.model.commit import PreparedChanges, PreparedStore
from statemgr.model.snapshot import MAX_DEPTH, DirIndex, FileIndex, name_problem

_E = TypeVar("_E", Attachment, BlobMarker, ChainSegment, PreparedChanges)
#: Partition numbers have fewer digits than this.
_DIGITS = 10


class Directory(NamedTuple):
    """A directory without those in it. ``parent``: the parent's position in the list, -1 for the root."""

    name: str
    parent: int
    files: tuple[FileIndex, ...]


def _to_runs(inputs: Inputs) -> dict[str, Any]:
    """For each topic its ID and the offsets of its partitions, in runs of consecutive partitions: a few bytes per
    partition, where a map of their names would take tens."""
    topics: dict[str, dict[int, int]] = {topic: {} for topic in inputs.topic_ids}
    others: dict[str, int] = {}
    for name, offset in inputs.offsets.items():
        topic, dash, number = name.rpartition("-")
        if dash and _is_number(number):
            topics.setdefault(topic, {})[int(number)] = offset
        else:
            others[name] = offset
    found = [
        {"topic": topic, "topic_id": inputs.topic_ids.get(topic), "runs": _runs(topics[topic])}
        for topic in sorted(topics)
    ]
    return {"topics": found, "others": dict(sorted(others.items()))}


def _is_number(text: str) -> bool:
    """Whether it is the plain decimal form of a partition's number, from which the same name can be made again."""
    return text.isascii() and text.isdigit() and len(text) < _DIGITS and (text == "0" or text[0] != "0")


def _runs(offsets: Mapping[int, int]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    following = -1
    for partition in sorted(offsets):
        if partition != following:
            runs.append({"first": partition, "offsets": []})
        runs[-1]["offsets"].append(offsets[partition])
        following = partition + 1
    return runs


def _from_runs(value: dict[str, Any]) -> Inputs:
    offsets: dict[str, int] = value["others"]
    ids: dict[str, str] = {}
    count = len(offsets)
    for topic in value["topics"]:
        name = topic["topic"]
        if topic["topic_id"] is not None:
            ids[name] = topic["topic_id"]
        for run in topic["runs"]:
            first, found = run["first"], run["offsets"]
            if first < 0:
                raise ValueError(f"the input topic {name!r} has the partition {first}")
            count += len(found)
            offsets.update((f"{name}-{first + n}", offset) for n, offset in enumerate(found))
    if len(offsets) != count:
        raise ValueError("it names a source partition twice")
    return Inputs(offsets, ids)


def _flat(root: DirIndex) -> tuple[Directory, ...]:
    """The tree, parents first, so that hostile bytes cannot make a reader recurse."""
    found: list[Directory] = []
    pending = [(root, -1)]
    while pending:
        directory, parent = pending.pop()
        found.append(Directory(directory.name, parent, directory.files))
        own = len(found) - 1
        pending.extend((sub, own) for sub in reversed(directory.dirs))
    return tuple(found)


def _tree(directories: tuple[Directory, ...]) -> DirIndex:
    depths: list[int] = []
    for number, (name, parent, _) in enumerate(directories):
        if (number == 0) != (parent == -1) or parent < -1 or parent >= number:
            raise ValueError(f"directory {name!r} has the parent {parent}")
        depths.append(0 if parent == -1 else depths[parent] + 1)
        if depths[-1] > MAX_DEPTH:
            raise ValueError(f"directories deeper than {MAX_DEPTH}")
    if not directories or directories[0].name:
        raise ValueError("it has no root directory")
    subs: list[list[DirIndex]] = [[] for _ in directories]
    # from the last to the first, so that every directory is complete before its parent
    for (name, parent, files), own in zip(reversed(directories), reversed(subs), strict=True):
        directory = DirIndex(name, files, tuple(reversed(own)))
        if parent >= 0:
            subs[parent].append(directory)
    return directory


def _exactly_one(value: _E) -> _E:
    if (value.inline is None) == (value.blob is None):
        raise ValueError(f"the record {type(value).__name__} needs exactly one of inline and blob")
    return value


def _blob(blob: BlobRef) -> BlobRef:
    if blob.size < 0 or (blob.offset is not None and blob.offset < 0):
        raise ValueError(f"blob {blob.blob_id!r} has a negative size or offset")
    return blob


def changelog_marker(marker: ChangelogMarker) -> ChangelogMarker:
    """A marker that was read. Raises: ValueError for a negative partition, or offsets that are negative or no range."""
    if marker.partition < 0 or not 0 <= marker.start <= marker.offset:
        raise ValueError(
            f"changelog marker of {marker.topic!r} has partition {marker.partition} and offsets {marker.start} to "
            f"{marker.offset}"
        )
    return marker


def _task(task: TaskCheckpoint) -> TaskCheckpoint:
    _check_state_ids(task.stores.values())
    return task


def _store(store: PreparedStore) -> PreparedStore:
    _check_state_ids((store.state_id,))
    return store


def _check_state_ids(state_ids: Iterable[str]) -> None:
    """A state ID becomes a local directory's name."""
    for state_id in state_ids:
        if problem := name_problem(state_id):
            raise ValueError(f"state ID {state_id!r} {problem}")


SHAPES = Shapes(
    forms={
        CheckpointId: Form(str, str, CheckpointId.parse),
        Inputs: Form(dict, _to_runs, _from_runs),
        DirIndex: Form(tuple[Directory, ...], _flat, _tree),
    },
    rules={
        Attachment: _exactly_one,
        BlobRef: _blob,
        BlobMarker: _exactly_one,
        ChainSegment: _exactly_one,
        ChangelogMarker: changelog_marker,
        PreparedChanges: _exactly_one,
        PreparedStore: _store,
        TaskCheckpoint: _task,
    },
)
