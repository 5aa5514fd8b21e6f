"""What the writer of one store knows about its segment chain beyond what is published. No I/O.

The changes of an open store are numbered from 0 when it is opened; those of its chain continue where the published one
ends. The offset between the two is known as soon as a commit names the chain that it continues.

Source: Flink's generalised incremental checkpoints (FLIP-158). The change buffer does *append*; *persist* (after a
number) is :meth:`WriterState.unpersisted` and :meth:`WriterState.persisted`; *truncate* (before a number) is what a
background snapshot does, and *confirm* that a chain was published is :meth:`WriterState.continue_from`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, history_of, truncated
from statemgr.model.checkpoint import BlobRef
from statemgr.model.commit import NumberedChanges
from statemgr.ports import Moment

#: Seconds for which a stored segment or snapshot may wait for a publish: less than half of the shortest grace period,
#: after which garbage collection might delete it.
REUSE_S = 6 * 3600


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A stored snapshot that no published chain begins with yet.

    Attributes:
        snapshot: its index, its state, and the number after the last change that it has for certain: a number of the
            open store's changes, or of the chain if there is a ``history``. It may have later changes that were made
            while it was taken.
        base: the index that it was diffed against, whose blobs it shares.
        blobs: the blobs that were added for it.
        stored: when its upload began.
        freeze: only a commit of a later freeze may begin with it.
        reach: the number of the chain after the last change that it may have.
        history: the segments on top of the base up to there (:func:`statemgr.model.chain.history_of`), because numbers
            alone do not distinguish two histories; None in the process that keeps the store open.
    """

    snapshot: ChainSnapshot
    base: BlobRef
    blobs: tuple[str, ...]
    stored: Moment
    freeze: int = -1
    reach: int = 0
    history: bytes | None = None

    def fits(self, chain: SegmentChain, now: Moment) -> bool:
        """Whether a commit that continues the chain may begin with it."""
        if chain.snapshot.index != self.base or not is_young(self.stored, now):
            return False
        if self.history is None:
            return True
        covered = [segment for segment in chain.segments if segment.end <= self.reach]
        return bool(covered) and covered[-1].end == self.reach and history_of(covered) == self.history

    def reaching(self, chain: SegmentChain, end: int) -> PendingSnapshot:
        """For other processes: it has every change of the chain below ``end``, and none that the chain lacks."""
        snapshot, history = replace(self.snapshot, end=end), history_of(chain.segments)
        return replace(self, snapshot=snapshot, freeze=-1, reach=chain.end, history=history)


@dataclass
class WriterState:
    """The unpublished part of one open store's chain. One commit at a time uses it, also during a background snapshot.

    Attributes:
        chain: the published chain that the next commit continues.
        durable: segments after its end that earlier, failed commits have stored, and when. The next commit uses them.
        pending: a snapshot that the next commit may begin with.
        has_restarted: whether a commit has begun to fill the backend. Until another one continues a published chain,
            it is not known which numbers the store's changes have there.
    """

    chain: SegmentChain | None = None
    durable: list[tuple[ChainSegment, Moment]] = field(default_factory=list)
    pending: PendingSnapshot | None = None
    has_restarted: bool = False
    _offset: int = 0

    def continue_from(self, chain: SegmentChain, changes: NumberedChanges, now: Moment) -> None:
        """Let the next commit continue a published chain. Drops stored segments that the chain already has or that
        are too old, and everything if the chain has another lineage: the backend was filled again meanwhile."""
        if self.chain is not None and self.chain.lineage != chain.lineage:
            self.start_lineage()
        self.chain = chain
        self._offset = chain.end - changes.first
        kept = [(s, at) for s, at in self.durable if s.first >= chain.end]
        self.durable = kept if all(is_young(at, now) for _, at in kept) else []

    def start_lineage(self) -> None:
        """Let the next commit fill the backend: nothing that was stored before counts."""
        self.chain, self.pending, self.has_restarted = None, None, True
        self.durable, self._offset = [], 0

    @property
    def published(self) -> tuple[ChainSegment, ...]:
        """The segments of the published chain."""
        return self.chain.segments if self.chain else ()

    def number_of(self, change: int) -> int:
        """The chain's number for a number of the open store's changes."""
        return change + self._offset

    def unpersisted(self, changes: NumberedChanges) -> tuple[NumberedChanges, int]:
        """The changes that no stored segment has, and the chain's number of the first of them."""
        assert self.chain is not None
        end = self.durable[-1][0].end if self.durable else self.chain.end
        return changes.since(end - self._offset), end

    def persisted(self, segment: ChainSegment, now: Moment) -> None:
        """Note a stored segment. If its commit fails, the next one uses it again."""
        self.durable.append((segment, now))

    def begin_with(self, pending: PendingSnapshot) -> None:
        """Let the next commit begin with a snapshot that another process has left."""
        snapshot = replace(pending.snapshot, end=pending.snapshot.end - self._offset)
        self.pending = replace(pending, snapshot=snapshot, history=None)

    def snapshot_for(self, changes: NumberedChanges, now: Moment) -> tuple[ChainSnapshot, tuple[str, ...]] | None:
        """The snapshot that a commit of these changes begins with, and its blobs; None for the published snapshot."""
        assert self.chain is not None
        pending = self.pending
        if pending is None or pending.freeze >= changes.freeze or not pending.fits(self.chain, now):
            return None
        return replace(pending.snapshot, end=self.number_of(pending.snapshot.end)), pending.blobs

    def stored_after(self, number: int) -> tuple[ChainSegment, ...]:
        """All stored segments that have changes from ``number`` on; a segment with earlier ones too stays whole."""
        assert self.chain is not None
        return truncated((*self.chain.segments, *(segment for segment, _ in self.durable)), number)


def is_young(stored: Moment, now: Moment) -> bool:
    """Whether something that was stored at a moment may still be published; False if its age is unknown."""
    age_s = now.seconds_since(stored)
    return age_s is not None and age_s < REUSE_S
