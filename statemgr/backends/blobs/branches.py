"""Chains that continue the snapshot and the segments of another chain: of an older state of the same store, or of a
store of another job, whose blobs are copied.

In a copy, segments keep their names below the job's prefix, so that stores and tasks that share a blob share its copy.
Files of the snapshot get names below the index's own attempt, whichever attempt uploaded them. So the copied index says
which blobs belong to it, and an opening finds the TTLs that a crash has left. All names follow from the source alone: a
copy that is run again finds the blobs that it has copied before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from statemgr.backends.blobs.catalogue import Catalogue, validate_for
from statemgr.backends.blobs.names import index_blob, segments_blob, store_prefix
from statemgr.model.chain import ChainSegment, SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef, Marker
from statemgr.model.codecs import encode_chain, encode_index
from statemgr.model.hashing import content_hash
from statemgr.model.record_size import inline_chain_limit
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex
from statemgr.phases import Phase
from statemgr.ports import PreparedBackup, StoreIdentity
from statemgr.services import Services

#: A blob, or a part of one, and the bytes that it takes there.
Part = tuple[BlobRef, int]


def branch(services: Services, identity: StoreIdentity, chain: SegmentChain, *, together: bool) -> PreparedBackup:
    """A marker of ``chain`` as an attempt of its own. A chain that is too large for the record is stored as a blob.

    Args:
        together: whether all tasks of the job are published together, and share the limit.
    """
    return put_chain(services, identity, replace(chain, attempt=services.ids.attempt_id()), together=together)


def put_chain(services: Services, identity: StoreIdentity, chain: SegmentChain, *, together: bool) -> PreparedBackup:
    """The marker of a chain whose snapshot and segments are stored. Arguments and errors as for :func:`branch`."""
    data = encode_chain(chain)
    limit = inline_chain_limit(len(services.config.stores), services.config.tasks if together else 1)
    if not chain.segments or len(data) <= limit:
        return PreparedBackup(BlobMarker(inline=data))
    ref = services.transfer().put(segments_blob(identity, chain.attempt), data)
    return PreparedBackup(BlobMarker(ref), added_blobs=(ref.blob_id,), added_bytes=len(data))


@dataclass(frozen=True)
class StoreCopy:
    """One store's copy, as it will be.

    Attributes:
        chain: the chain of the new job; the reference to its index is complete when the index is stored.
        index: the index of the new job, and ``index_blob`` the name for it.
        blobs: name of the new blob → name of the old one.
        parts: name of the new blob → what a restore reads from it.
    """

    identity: StoreIdentity
    chain: SegmentChain
    index: SnapshotIndex
    index_blob: str
    blobs: Mapping[str, str]
    parts: Mapping[str, Sequence[Part]]


def plan_copy(catalogue: Catalogue, source: StoreIdentity, target: StoreIdentity, marker: Marker) -> StoreCopy:
    """Describe the copy of the state that ``marker`` names.

    Raises: MissingState (another backend's marker), MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
    """
    chain = catalogue.chain(source, marker)
    index = catalogue.index(source, chain.snapshot.index)
    names = _Names(source, target, index.attempt)

    def renamed(ref: BlobRef, stored: int, name_of: Callable[[str], str]) -> BlobRef:
        return names.take(ref, stored, name_of(ref.blob_id))

    def segment(one: ChainSegment) -> ChainSegment:
        return one if one.blob is None else replace(one, blob=renamed(one.blob, one.blob.size, names.of_segment))

    def file(one: FileIndex) -> FileIndex:
        return replace(one, parts=tuple(renamed(ref, stored, names.of_part) for ref, stored in one.stored()))

    def directory(one: DirIndex) -> DirIndex:
        return replace(one, files=tuple(map(file, one.files)), dirs=tuple(map(directory, one.dirs)))

    segments, root = tuple(map(segment, chain.segments)), directory(index.root)
    copied_index = replace(
        index, job_name=target.job_name, job_id=target.job_id, task=target.task, store=target.store, root=root,
        previous=None,
    )  # fmt: skip
    copied_chain = replace(
        chain, job_name=target.job_name, job_id=target.job_id, task=target.task, store=target.store, segments=segments,
        added=(),
    )  # fmt: skip
    index_name = index_blob(target, index.attempt)
    return StoreCopy(target, copied_chain, copied_index, index_name, names.blobs, names.parts)


def store_copy(services: Services, copied: StoreCopy, *, together: bool) -> PreparedBackup:
    """Store the index and the chain of a copy, whose blobs exist already. ``services`` are those of the new job.

    An index that an earlier run has stored is the same one. ``together``: as in :func:`branch`.
    Raises: CorruptBlob (nobody could restore it), UnavailableError, AccessDenied, DiskFull.
    """
    identity = copied.identity
    identity.announce(Phase.PUT_INDEX)
    validate_for(copied.index, identity, copied.index_blob)
    ref = services.transfer().put(copied.index_blob, encode_index(copied.index))
    snapshot = replace(copied.chain.snapshot, index=ref)
    segments = tuple(segment.blob.blob_id for segment in copied.chain.segments if segment.blob is not None)
    chain = replace(copied.chain, snapshot=snapshot, added=tuple(dict.fromkeys((ref.blob_id, *segments))))
    validate_for(chain, identity, ref.blob_id)
    made = branch(services, identity, chain, together=together)
    added = (*copied.blobs, ref.blob_id, *made.added_blobs)
    return replace(made, added_blobs=added)


@dataclass
class _Names:
    """Gives blobs of the source their new names, and notes them."""

    source: StoreIdentity
    target: StoreIdentity
    attempt: str
    blobs: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)

    def of_segment(self, blob_id: str) -> str:
        return f"{self.target.job_key}/{blob_id.removeprefix(f'{self.source.job_key}/')}"

    def of_part(self, blob_id: str) -> str:
        own, new = f"{store_prefix(self.source)}{self.attempt}/", f"{store_prefix(self.target)}{self.attempt}/"
        if blob_id.startswith(own):
            return new + blob_id.removeprefix(own)
        return f"{new}earlier/{content_hash(blob_id.encode()).hex()}"

    def take(self, ref: BlobRef, stored: int, name: str) -> BlobRef:
        self.blobs[name] = ref.blob_id
        copied = replace(ref, blob_id=name)
        self.parts.setdefault(name, []).append((copied, stored))
        return copied
