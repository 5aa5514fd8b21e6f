"""writer_state: what a commit continues, repeats or drops, according to the sequence numbers of FLIP-158."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from statemgr.backends.blobs.writer_state import REUSE_S, PendingSnapshot, WriterState
from statemgr.local.change_buffer import ChangeBuffer, FrozenChanges
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobRef
from statemgr.ports import Moment

NOW, LATE = Moment("run", 0.0, 0), Moment("run", float(REUSE_S), REUSE_S * 1000)
INDEX, NEWER = BlobRef("j/1/a/index", 1, bytes(16)), BlobRef("j/1/b/index", 1, bytes(16))


def chain(start: int, *ranges: tuple[int, int], index: BlobRef = INDEX) -> SegmentChain:
    """Return a published chain."""
    segments = tuple(segment(first, end) for first, end in ranges)
    return SegmentChain("j", "1", "Partition 0", "s", "id", "a", "l", 0, ChainSnapshot(index, "snap", start), segments)


def segment(first: int, end: int) -> ChainSegment:
    """Return a segment in a blob of its own."""
    return ChainSegment(first, end, BlobRef(f"j/1/{first}", 1, bytes(16)))


def frozen(buffer: ChangeBuffer, *keys: bytes) -> FrozenChanges:
    """Add changes, and return all that are not acknowledged."""
    buffer.extend((key, b"") for key in keys)
    return buffer.freeze()


def ranges(segments: Sequence[ChainSegment]) -> list[tuple[int, int]]:
    """Return the sequence numbers of segments."""
    return [(found.first, found.end) for found in segments]


def test_numbers_go_on_where_the_published_chain_ends(tmp_path: Path) -> None:
    """After a chain that ends at change 100, the next change has the number 100, whatever the buffer counts."""
    writer, changes = WriterState(), frozen(ChangeBuffer(tmp_path, 1000), b"a", b"b")
    writer.continue_from(chain(90, (90, 100)), changes, NOW)
    pending, first = writer.unpersisted(changes)
    assert (first, writer.number_of(changes.end), list(pending)) == (100, 102, list(changes))


def test_a_stored_segment_is_not_written_again(tmp_path: Path) -> None:
    """C2: after a failed commit only later changes are written. Once published, no stored segment is left over."""
    writer, buffer = WriterState(), ChangeBuffer(tmp_path, 1000)
    base = chain(0)
    writer.continue_from(base, frozen(buffer, b"a"), NOW)
    writer.persisted(segment(0, 1), NOW)
    changes = frozen(buffer, b"b")
    writer.continue_from(base, changes, NOW)
    pending, first = writer.unpersisted(changes)
    assert (first, list(pending)) == (1, [(b"b", b"")])
    assert ranges(writer.stored_after(0)) == [(0, 1)]
    buffer.acknowledge(changes)
    writer.continue_from(chain(0, (0, 1), (1, 2)), frozen(buffer), NOW)
    assert writer.durable == []


def test_what_waited_too_long_is_written_again(tmp_path: Path) -> None:
    """FAULT 38: a segment or snapshot that garbage collection may have deleted is not published."""
    writer, buffer, base = WriterState(), ChangeBuffer(tmp_path, 1000), chain(0)
    writer.continue_from(base, frozen(buffer, b"a"), NOW)
    writer.persisted(segment(0, 1), NOW)
    writer.pending = PendingSnapshot(ChainSnapshot(NEWER, "new", 1), INDEX, (), NOW, freeze=0)
    changes = frozen(buffer)
    writer.continue_from(base, changes, LATE)
    assert writer.unpersisted(changes)[1] == 0
    assert writer.snapshot_for(changes, LATE) is None


def test_a_snapshot_is_taken_up_by_a_later_commit_alone(tmp_path: Path) -> None:
    """C1: a commit frozen before the snapshot cannot use it, nor can a commit on another base."""
    writer, buffer = WriterState(), ChangeBuffer(tmp_path, 1000)
    base, before = chain(40, (40, 50)), frozen(buffer, b"a")
    writer.continue_from(base, before, NOW)
    mark = buffer.nothing_until(buffer.seal())
    writer.pending = PendingSnapshot(ChainSnapshot(NEWER, "new", mark.end), INDEX, ("x",), NOW, mark.freeze)
    assert writer.snapshot_for(before, NOW) is None
    after = frozen(buffer, b"b")
    assert writer.snapshot_for(after, NOW) == (ChainSnapshot(NEWER, "new", 51), ("x",))
    writer.continue_from(chain(40, (40, 50), index=NEWER), after, NOW)
    assert writer.snapshot_for(after, NOW) is None


def test_a_fill_forgets_what_was_stored(tmp_path: Path) -> None:
    """Invariant 4: a backend that is filled again continues nothing from before."""
    writer, buffer = WriterState(), ChangeBuffer(tmp_path, 1000)
    writer.continue_from(chain(0, (0, 7)), frozen(buffer, b"a"), NOW)
    writer.persisted(segment(7, 8), NOW)
    writer.pending = PendingSnapshot(ChainSnapshot(NEWER, "new", 1), INDEX, (), NOW, freeze=0)
    writer.start_lineage()
    assert (writer.durable, writer.pending, writer.published, writer.number_of(3)) == ([], None, (), 3)
