"""Notes on this machine about a store's chain, for a later restore or commit here.

A *position* says at which point of its chain a local directory is: a restore begins there instead of at the snapshot. A
*pending snapshot* was made in the background, and has nothing that was not published: a later commit builds on it. A
*damaged* snapshot is restored as a whole, because a restore can take another one.

Each note is a file next to the store's directories, so that every process here finds it. It is a cache: a note that is
damaged, does not fit the published chain or is too old is not used, and the blobs of a pending snapshot expire.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from statemgr.backends.blobs.writer_state import PendingSnapshot
from statemgr.errors import InvalidError
from statemgr.local import durable
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.model.chain import ChainSnapshot, SegmentChain, history_of
from statemgr.model.checkpoint import BlobRef
from statemgr.os_errors import disk_errors
from statemgr.ports import Moment, StoreIdentity
from statemgr.services import Services

log = logging.getLogger(__name__)
_POSITIONS, _PENDING, _DAMAGED = "positions.json", "snapshot.pending", "damaged.json"
_MOST_POSITIONS = 8
_POSITIONS_SIZE = 64 * 1024
#: Bytes; a pending snapshot names its blobs.
_PENDING_SIZE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Position:
    """The position of one local directory.

    Attributes:
        state_id: the state of the directory.
        base: the index of the snapshot that the segments begin at.
        end: the sequence number after the last change that the directory has.
        history: those segments (:func:`history_of`), because numbers alone do not distinguish two histories.
        compacted: it was compacted, so that a restore prefers it, and newer segments, to a newer directory.
    """

    state_id: str
    base: str
    end: int
    history: str
    compacted: bool = False

    def fits(self, chain: SegmentChain) -> bool:
        """Whether the chain goes through this state."""
        covered = [segment for segment in chain.segments if segment.end <= self.end]
        end = covered[-1].end if covered else chain.snapshot.end
        return (
            _place(chain.snapshot.index) == self.base and end == self.end and history_of(covered).hex() == self.history
        )


def _place(ref: BlobRef) -> str:
    return f"{ref.blob_id}@{ref.offset or 0}"


class ChainPositions:
    """The positions of the local directories of one store of one task. Failing to write a note is no error."""

    def __init__(self, services: Services, identity: StoreIdentity) -> None:
        self._path: Path = services.task_directory(identity.task) / identity.store / _POSITIONS

    def note(self, chain: SegmentChain) -> None:
        """Note that the directory of the chain's state is at the chain's end."""
        position = Position(chain.state_id, _place(chain.snapshot.index), chain.end, history_of(chain.segments).hex())
        others = [known for known in self._read() if known.state_id != chain.state_id]
        self._write([position, *others])

    def mark_compacted(self, state_id: str, *, compacted: bool) -> None:
        """Note whether a directory is compacted, if its position is known."""
        known = self._read()
        marked = [replace(p, compacted=compacted) if p.state_id == state_id else p for p in known]
        if marked != known:
            self._write(marked)

    def fitting(self, chain: SegmentChain) -> Mapping[str, Position]:
        """State ID → position, for the directories that the chain goes through."""
        return {known.state_id: known for known in self._read() if known.fits(chain)}

    def compacted(self) -> Sequence[Position]:
        """The compacted directories."""
        return [known for known in self._read() if known.compacted]

    def _read(self) -> list[Position]:
        try:
            return [Position(**found) for found in durable.read_note(self._path, _POSITIONS_SIZE)]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self, positions: Sequence[Position]) -> None:
        try:
            durable.write_note(self._path, [asdict(position) for position in positions[:_MOST_POSITIONS]])
        except FileNotFoundError:
            return  # this machine has no directory of the store
        except OSError as error:
            log.warning("the positions of local directories were not saved: %s", error)


class DamageNote:
    """The snapshot of which a part was found missing or damaged last, so that no process here reads it by need. Failing
    to write the note is no error."""

    def __init__(self, services: Services, identity: StoreIdentity) -> None:
        self._path: Path = services.task_directory(identity.task) / identity.store / _DAMAGED

    def write(self, index: BlobRef) -> None:
        """Note the index of a snapshot."""
        try:
            durable.write_note(self._path, [_place(index)])
        except OSError as error:
            log.warning("a damaged snapshot was not noted: %s", error)

    def names(self, index: BlobRef) -> bool:
        """Whether it is this snapshot."""
        try:
            return bool(durable.read_note(self._path, _POSITIONS_SIZE) == [_place(index)])
        except (OSError, ValueError, TypeError):
            return False


class PendingNote:
    """The pending snapshot of one store of one task, for the commits of every process on this machine."""

    def __init__(self, services: Services, identity: StoreIdentity) -> None:
        self._levels = services.task_directory(identity.task), identity.store
        self._path = Path(*self._levels) / _PENDING

    @contextmanager
    def making(self) -> Iterator[bool]:
        """Make a snapshot inside the block. Yields: whether no other process here makes one. Raises: DiskFull."""
        with disk_errors(self._path):
            durable.make_private(*self._levels)
        with disk_errors(self._path), exclusive_if_free(self._path.with_name(f"{_PENDING}.lock")) as is_free:
            yield is_free

    def write(self, pending: PendingSnapshot) -> None:
        """Replace the note, inside :meth:`making`. A failure is no error: the blobs expire."""
        try:
            durable.write_note(self._path, _to_json(pending))
        except OSError as error:
            log.warning("a snapshot was not saved for later commits on this machine: %s", error)

    def find(self, chain: SegmentChain, now: Moment) -> PendingSnapshot | None:
        """The pending snapshot, if it fits a published chain."""
        try:
            durable.check_private(*self._levels)
            pending = _from_json(durable.read_note(self._path, _PENDING_SIZE))
        except (OSError, InvalidError, ValueError, KeyError, TypeError):
            return None
        return pending if pending.fits(chain, now) else None

    def remove(self) -> None:
        """Remove the note of a snapshot that is of no use."""
        with suppress(OSError):  # anything else there is not read as a note either
            durable.remove(self._path)


def _to_json(pending: PendingSnapshot) -> dict[str, Any]:
    index = pending.snapshot
    return {
        "snapshot": {"index": _ref(index.index), "state_id": index.state_id, "end": index.end},
        "base": _ref(pending.base),
        "reach": pending.reach,
        "history": (pending.history or b"").hex(),
        "blobs": pending.blobs,
        "stored": astuple(pending.stored),
    }


def _from_json(found: dict[str, Any]) -> PendingSnapshot:
    snapshot = found["snapshot"]
    return PendingSnapshot(
        ChainSnapshot(_blob(snapshot["index"]), snapshot["state_id"], snapshot["end"]),
        _blob(found["base"]),
        tuple(found["blobs"]),
        Moment(*found["stored"]),
        reach=found["reach"],
        history=bytes.fromhex(found["history"]),
    )


def _ref(blob: BlobRef) -> dict[str, Any]:
    return asdict(blob) | {"hash": blob.hash.hex()}


def _blob(found: dict[str, Any]) -> BlobRef:
    return BlobRef(**found | {"hash": bytes.fromhex(found["hash"])})
