"""What the writer of one store knows of its segment chain beyond what is published. No I/O.

The changes of an open store are numbered from 0 on when it is opened; those of its chain go on where the published
one ends. Between them lies an offset, which is known as soon as a commit names the chain that it continues.

Source: Flink's generalised incremental checkpoints (FLIP-158). *append* is the change buffer's business; *persist*
(after a number) is :meth:`SegmentLog.unpersisted` and :meth:`SegmentLog.persisted`; *truncate* (before a number) is
what a materialised snapshot does, and *confirm* that a chain was published is :meth:`SegmentLog.continue_from`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, truncated
from statemgr.model.checkpoint import BlobRef
from statemgr.model.commit import NumberedChanges
from statemgr.ports import Moment

#: Seconds for which what was stored may wait for a publish: less than half of the shortest grace period, after
#: which a collection might take it.
REUSE_S = 6 * 3600


@dataclass(frozen=True, slots=True)
class Materialized:
    """A snapshot that no published chain has yet.

    It has every change below ``end`` (a number of the open store's) and perhaps some that were made while it was taken:
    only a commit that was frozen after that may begin with it, of a later ``freeze``.

    ``base``: the index that it was diffed against, whose blobs it shares. ``blobs`` were added for it, from
    ``stored`` on.
    """

    index: BlobRef
    state_id: str
    end: int
    freeze: int
    base: BlobRef
    blobs: tuple[str, ...]
    stored: Moment


@dataclass
class SegmentLog:
    """The unpublished part of one open store's chain. One commit at a time uses it; a materialisation may run beside.

    ``chain`` is the published one that the next continues. ``durable``: segments after its end that earlier, failed
    commits have stored, and when; the next commit takes them as they are.
    """

    chain: SegmentChain | None = None
    durable: list[tuple[ChainSegment, Moment]] = field(default_factory=list)
    waiting: Materialized | None = None
    _offset: int = 0

    def continue_from(self, chain: SegmentChain, changes: NumberedChanges, now: Moment) -> None:
        """The next commit continues a published chain. What that has already, or what waited too long, is let go.

        So is everything when the chain is of another lineage: the backend was filled again meanwhile.
        """
        if self.chain is not None and self.chain.lineage != chain.lineage:
            self.start_anew()
        self.chain = chain
        self._offset = chain.end - changes.first
        kept = [(s, at) for s, at in self.durable if s.first >= chain.end]
        self.durable = kept if all(is_young(at, now) for _, at in kept) else []

    def start_anew(self) -> None:
        """The next commit fills the backend: nothing of what was stored before counts."""
        self.chain = self.waiting = None
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
        """A segment was stored: if the commit that it was made for fails, the next one uses it again."""
        self.durable.append((segment, now))

    def usable(self, chain: SegmentChain, now: Moment) -> Materialized | None:
        """The snapshot that waits, unless the published chain stands on another one by now, or it waited too long."""
        waiting = self.waiting
        if waiting is None or waiting.base != chain.snapshot.index or not is_young(waiting.stored, now):
            return None
        return waiting

    def begin_with(self, snapshot: ChainSnapshot, base: BlobRef, blobs: tuple[str, ...], stored: Moment) -> None:
        """The next commit takes a snapshot up of a state that is in the published chain."""
        end = snapshot.end - self._offset
        self.waiting = Materialized(snapshot.index, snapshot.state_id, end, -1, base, blobs, stored)

    def snapshot_for(self, changes: NumberedChanges, now: Moment) -> tuple[ChainSnapshot, tuple[str, ...]] | None:
        """The snapshot that a commit of these changes takes up, and its blobs; None when the published one stays."""
        assert self.chain is not None
        waiting = self.usable(self.chain, now)
        if waiting is None or waiting.freeze >= changes.freeze:
            return None
        return ChainSnapshot(waiting.index, waiting.state_id, self.number_of(waiting.end)), waiting.blobs

    def stored_after(self, number: int) -> tuple[ChainSegment, ...]:
        """All stored segments that have changes from ``number`` on: one that straddles it stays whole."""
        assert self.chain is not None
        return truncated((*self.chain.segments, *(segment for segment, _ in self.durable)), number)


def is_young(stored: Moment, now: Moment) -> bool:
    """Whether what was stored may still be published. Not where nobody knows how long ago that was."""
    age_s = now.seconds_since(stored)
    return age_s is not None and age_s < REUSE_S
