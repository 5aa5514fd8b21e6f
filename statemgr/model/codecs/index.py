"""Index blobs ↔ bytes. Pure.

The directory tree is written flat, parents first, so that hostile bytes cannot make a reader recurse.
"""

from __future__ import annotations

from statemgr.errors import ANOTHER_COPY, CorruptBlob, InvalidError
from statemgr.model.codecs.parts import (
    Avro,
    blob_from_avro,
    blob_to_avro,
    optional_blob_from_avro,
    optional_blob_to_avro,
)
from statemgr.model.codecs.wire import Refuse, decode, encode
from statemgr.model.snapshot import MAX_DEPTH, MAX_INDEX_SIZE, DirIndex, FileIndex, SnapshotIndex


def encode_index(index: SnapshotIndex) -> bytes:
    """The content of an index blob. Raises: InvalidError when it fits neither the schema nor the limit."""
    data = encode(
        "snapshot_index.v1",
        {
            "job_name": index.job_name,
            "job_id": index.job_id,
            "task": index.task,
            "store": index.store,
            "state_id": index.state_id,
            "attempt": index.attempt,
            "created_ms": index.created_ms,
            "previous": optional_blob_to_avro(index.previous),
            "dirs": _flatten(index.root),
        },
    )
    if len(data) > MAX_INDEX_SIZE:
        raise InvalidError(f"an index of {len(data)} bytes is over {MAX_INDEX_SIZE}", store=index.store)
    return data


def decode_index(data: bytes, blob_id: str | None = None) -> SnapshotIndex:
    """Decode the content of an index blob: well formed then, but not yet trusted (see ``snapshot.validate``).

    Raises: CorruptBlob naming the blob.
    """

    def refuse(why: str) -> CorruptBlob:
        return CorruptBlob(
            f"index blob refused: {why}",
            blob=blob_id,
            hint=ANOTHER_COPY,
        )

    if len(data) > MAX_INDEX_SIZE:
        raise refuse(f"it is larger than {MAX_INDEX_SIZE} bytes")
    value = decode("snapshot_index.v1", data, refuse)
    try:
        previous = optional_blob_from_avro(value["previous"])
        files = [tuple(_file_from_avro(file) for file in entry["files"]) for entry in value["dirs"]]
    except ValueError as error:
        raise refuse(str(error)) from error
    return SnapshotIndex(
        job_name=value["job_name"],
        job_id=value["job_id"],
        task=value["task"],
        store=value["store"],
        state_id=value["state_id"],
        attempt=value["attempt"],
        created_ms=value["created_ms"],
        root=_unflatten(value["dirs"], files, refuse),
        previous=previous,
    )


def _flatten(root: DirIndex) -> list[Avro]:
    entries: list[Avro] = []
    pending = [(root, -1)]
    while pending:
        directory, parent = pending.pop()
        files = [_file_to_avro(file) for file in directory.files]
        entries.append({"name": directory.name, "parent": parent, "files": files})
        own = len(entries) - 1
        pending.extend((sub, own) for sub in reversed(directory.dirs))
    return entries


def _unflatten(entries: list[Avro], files: list[tuple[FileIndex, ...]], refuse: Refuse) -> DirIndex:
    depths: list[int] = []
    for number, entry in enumerate(entries):
        parent = entry["parent"]
        if (number == 0) != (parent == -1) or parent < -1 or parent >= number:
            raise refuse(f"directory {entry['name']!r} has the parent {parent}")
        depths.append(0 if parent == -1 else depths[parent] + 1)
        if depths[-1] > MAX_DEPTH:
            raise refuse(f"directories deeper than {MAX_DEPTH}")
    if not entries:
        raise refuse("it has no root directory")
    if entries[0]["name"]:
        raise refuse(f"its root is called {entries[0]['name']!r}")
    built: list[list[DirIndex]] = [[] for _ in entries]
    # From the last to the first, every directory is whole before its parent needs it.
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        directory = DirIndex(entry["name"], files[number], tuple(reversed(built[number])))
        if number == 0:
            return directory
        built[entry["parent"]].append(directory)
    raise AssertionError("unreachable: there is a root")


def _file_to_avro(file: FileIndex) -> Avro:
    return {
        "name": file.name,
        "size": file.size,
        "hash": file.hash,
        "inline": file.inline,
        "parts": [blob_to_avro(part) for part in file.parts],
        "frames": file.frames,
    }


def _file_from_avro(value: Avro) -> FileIndex:
    parts = tuple(blob_from_avro(part) for part in value["parts"])
    return FileIndex(value["name"], value["size"], value["hash"], value["inline"], parts, tuple(value["frames"]))
