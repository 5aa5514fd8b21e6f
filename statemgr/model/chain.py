"""Segment chains: a store's state as a snapshot and the changes after it, in segments. Pure.

Every change has a sequence number, one higher than the change before it. A range goes from ``first`` to ``end``,
without ``end``. A snapshot that covers ``end`` has the effect of every change below it. It may have later ones too:
these are also in the segments, and applying them again in order changes nothing.

Sources: Flink's generalised incremental checkpoints (FLIP-158), whose ``append``, ``persist`` and ``truncate`` work on
such numbers; Spark's changelog checkpointing of its RocksDB state store.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from statemgr.errors import ANOTHER_COPY, CorruptBlob
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import blob_id_problem, name_problem

#: Segments that one chain may have. If background snapshots keep failing, commits fail long before that.
MAX_SEGMENTS = 100_000
#: Bytes of an encoded chain.
MAX_CHAIN_SIZE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChainSegment:
    """The changes ``first`` to ``end`` - 1, as a change segment either in a blob or ``inline``.

    An empty blob ID stands for the blob of the chain itself.
    """

    first: int
    end: int
    blob: BlobRef | None = None
    inline: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes of the encoded segment."""
        return self.blob.size if self.blob is not None else len(self.inline or b"")


@dataclass(frozen=True, slots=True)
class ChainSnapshot:
    """A snapshot's index blob, the state ID of its content, and the sequence number below which it has every change."""

    index: BlobRef
    state_id: str
    end: int


@dataclass(frozen=True, slots=True)
class SegmentChain:
    """Necessary and sufficient to rebuild one state of a store.

    ``attempt``: as in a snapshot index. ``lineage``: the attempt that filled the backend, or the rollback that
    continues an older chain. In chains of one lineage a sequence number means the same change, unless the checkpoint
    topic has lost the checkpoint of one of them. ``added``: the blobs that the chain's own commit added, without the
    blob of the chain itself. For a snapshot it names only the index.
    """

    job_name: str
    job_id: str
    task: str
    store: str
    state_id: str
    attempt: str
    lineage: str
    created_ms: int
    snapshot: ChainSnapshot
    segments: tuple[ChainSegment, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The sequence number that the next change gets."""
        return self.segments[-1].end if self.segments else self.snapshot.end

    @property
    def start(self) -> int:
        """The lowest sequence number that a restore needs from the segments."""
        return self.snapshot.end

    def blobs(self) -> Iterator[BlobRef]:
        """Every blob that the chain refers to: the snapshot's index and the segments."""
        yield self.snapshot.index
        for segment in self.segments:
            if segment.blob is not None:
                yield segment.blob

    def lying_in(self, blob_id: str) -> SegmentChain:
        """The chain after it was read from a blob: segments in the same blob now name it, instead of an empty name."""
        return replace(self, segments=tuple(_named(segment, blob_id) for segment in self.segments))


def _named(segment: ChainSegment, blob_id: str) -> ChainSegment:
    if segment.blob is None or segment.blob.blob_id:
        return segment
    return replace(segment, blob=replace(segment.blob, blob_id=blob_id))


@dataclass(frozen=True, slots=True)
class Way:
    """How a state is rebuilt: a snapshot, and segments in order that together have all changes from the snapshot's end
    to the end of the state. Segments may overlap: a restore applies each change once."""

    snapshot: ChainSnapshot
    segments: tuple[ChainSegment, ...]


def own_way(chain: SegmentChain) -> Way:
    """The way with the chain's own snapshot and segments."""
    return Way(chain.snapshot, truncated(chain.segments, chain.start))


def another_way(
    chain: SegmentChain,
    older: Sequence[SegmentChain],
    broken_snapshots: Container[BlobRef],
    broken_segments: Container[ChainSegment],
) -> Way | None:
    """A way to the state of ``chain`` that needs no damaged snapshot or segment. It may use parts of older chains. None
    if there is none.

    ``older``: newest first. The search stops at a chain of another lineage, whose sequence numbers mean other changes,
    and at a chain that has changes after the end of a newer one, because a rollback took those changes back.
    """
    chains = [chain]
    for one in older:
        if one.lineage != chain.lineage or one.end > chains[-1].end:
            break
        chains.append(one)
    segments = [segment for one in chains for segment in one.segments if segment not in broken_segments]
    for snapshot in sorted({one.snapshot for one in chains}, key=lambda one: one.end, reverse=True):
        found: list[ChainSegment] = []
        reached = snapshot.end
        while reached < chain.end:
            following = [segment for segment in segments if segment.first <= reached < segment.end]
            if not following:
                break
            found.append(max(following, key=lambda segment: segment.end))
            reached = found[-1].end
        if reached == chain.end and snapshot.index not in broken_snapshots:
            return Way(snapshot, tuple(found))
    return None


def history_of(segments: Sequence[ChainSegment]) -> bytes:
    """XXH3-128 over the sequence numbers and the content of segments. It does not depend on where they are stored."""
    contents = (segment.blob.hash if segment.blob else content_hash(segment.inline or b"") for segment in segments)
    return content_hash(
        "\n".join(f"{s.first} {s.end} {h.hex()}" for s, h in zip(segments, contents, strict=True)).encode()
    )


def truncated(segments: tuple[ChainSegment, ...], before: int) -> tuple[ChainSegment, ...]:
    """The segments with changes from ``before`` on. A segment with changes on both sides stays whole."""
    return tuple(segment for segment in segments if segment.end > before)


def segments_between(older: SegmentChain, newer: SegmentChain) -> tuple[ChainSegment, ...] | None:
    """The segments from the end of one chain on that lead to the end of another.

    None if not all of them are there, or if nothing shows that the newer chain continues the older one: after the
    checkpoint topic has lost records, other changes have the same numbers.
    """
    if older.lineage != newer.lineage or not newer.start <= older.end <= newer.end:
        return None
    if newer.snapshot == older.snapshot:
        continues = history_of([s for s in newer.segments if s.end <= older.end]) == history_of(older.segments)
    else:
        continues = newer.snapshot.state_id == older.state_id
    return truncated(newer.segments, older.end) if continues else None


def validate_chain(chain: SegmentChain, where: str, *, job_name: str, job_id: str, task: str, store: str) -> None:
    """Refuse a hostile or foreign chain before it is used. ``where`` names its blob. Raises: CorruptBlob."""
    problem = _problem(chain, job_name, job_id, task, store)
    if problem:
        names = {"blob": where, "job": job_name, "task": task, "store": store}
        raise CorruptBlob(f"segment chain refused: {problem}", hint=ANOTHER_COPY, **names)


def _problem(chain: SegmentChain, job_name: str, job_id: str, task: str, store: str) -> str | None:
    owner = (chain.job_name, chain.job_id, chain.task, chain.store)
    if owner != (job_name, job_id, task, store):
        return f"it belongs to job {owner[0]!r}/{owner[1]!r}, task {owner[2]!r}, store {owner[3]!r}"
    for what, name in (
        ("state ID", chain.state_id),
        ("attempt", chain.attempt),
        ("lineage", chain.lineage),
        ("snapshot's state ID", chain.snapshot.state_id),
    ):
        if problem := name_problem(name):
            return f"its {what} {name!r} {problem}"
    if len(chain.segments) > MAX_SEGMENTS:
        return f"it has more than {MAX_SEGMENTS} segments"
    for blob_id in (*(blob.blob_id for blob in chain.blobs()), *chain.added):
        if problem := blob_id_problem(blob_id, job_name, job_id):
            return problem
    return _gap(chain)


def _gap(chain: SegmentChain) -> str | None:
    """Whether changes are missing between the snapshot and the segments, or between two segments."""
    expected: int | None = None
    for segment in chain.segments:
        if segment.first < 0 or segment.end <= segment.first:
            return f"it has a segment of changes {segment.first} to {segment.end}"
        if expected is None and segment.first > chain.start:
            return f"changes {chain.start} to {segment.first} are missing after its snapshot"
        if expected is not None and segment.first != expected:
            return f"its segments jump from change {expected} to {segment.first}"
        expected = segment.end
    if expected is not None and expected < chain.start:
        return f"its snapshot covers changes up to {chain.start}, beyond its end at {expected}"
    return None
