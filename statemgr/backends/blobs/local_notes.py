"""What this machine knows of a store's chain, for a later restore or commit here: positions and offers.

A position says at which point of its chain a local directory is: a restore begins there, not at the snapshot. An offer
is a snapshot of a published state, stored next to the attempts that went on from it: a later commit begins with it.

Each is a file next to the store's directories, so that every process here finds it. It is a cache: what is damaged,
does not fit the published chain or waited too long is not used, and the blobs of an offer expire.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from statemgr.backends.blobs.writer_state import is_young
from statemgr.backends.services import Services
from statemgr.errors import InvalidError
from statemgr.local import durable, levels
from statemgr.local.owners import exclusive_if_free
from statemgr.local.transfer_files import disk_errors
from statemgr.model.chain import ChainSnapshot, SegmentChain, history_of
from statemgr.model.checkpoint import BlobRef
from statemgr.ports import Moment, StoreIdentity

log = logging.getLogger(__name__)
_POSITIONS, _OFFER = "positions.json", "snapshot.offer"
_MOST_POSITIONS = 8
_POSITIONS_SIZE = 64 * 1024
#: Bytes; an offer names the blobs of one snapshot.
_OFFER_SIZE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Position:
    """One local directory.

    Attributes:
        state_id: whose directory it is.
        base: where the index of the snapshot is that the segments begin at.
        end: the sequence number after the last change that the directory has.
        history: those segments (:func:`history_of`): numbers alone do not tell two histories apart.
        compacted: it was compacted, so that a restore from it and the newer segments is worth more than a newer copy.
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
    """The positions of the local directories of one store of one task."""

    def __init__(self, services: Services, identity: StoreIdentity) -> None:
        self._path: Path = services.task_directory(identity.task) / identity.store / _POSITIONS

    def note(self, chain: SegmentChain) -> None:
        """The directory of the chain's own state is at its end. Failing is no error."""
        position = Position(chain.state_id, _place(chain.snapshot.index), chain.end, history_of(chain.segments).hex())
        others = [known for known in self._read() if known.state_id != chain.state_id]
        self._write([position, *others])

    def mark_compacted(self, state_id: str, *, compacted: bool) -> None:
        """Say of a directory that is known whether it is compacted. Failing is no error."""
        known = self._read()
        marked = [replace(p, compacted=compacted) if p.state_id == state_id else p for p in known]
        if marked != known:
            self._write(marked)

    def fitting(self, chain: SegmentChain) -> Mapping[str, Position]:
        """State ID → its position, of those that the chain goes through."""
        return {known.state_id: known for known in self._read() if known.fits(chain)}

    def compacted(self) -> Sequence[Position]:
        """Those that were compacted."""
        return [known for known in self._read() if known.compacted]

    def _read(self) -> list[Position]:
        try:
            return [Position(**found) for found in durable.read_note(self._path, _POSITIONS_SIZE)]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self, positions: Sequence[Position]) -> None:
        try:
            durable.write_note(self._path, [asdict(position) for position in positions[:_MOST_POSITIONS]])
        except OSError as error:
            log.warning("the positions of local directories were not saved: %s", error)


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that no published chain has yet.

    Attributes:
        snapshot: its index, and the state that it is of.
        base: the index that it was diffed against, whose blobs it shares.
        history: the segments on top of the base that it has (:func:`history_of`): numbers alone do not tell two
            histories apart.
        blobs: what was added for it.
        stored: when that was begun.
    """

    snapshot: ChainSnapshot
    base: BlobRef
    history: bytes
    blobs: tuple[str, ...]
    stored: Moment

    def fits(self, chain: SegmentChain, now: Moment) -> bool:
        """Whether a commit that continues the chain may begin with the snapshot."""
        covered = [segment for segment in chain.segments if segment.end <= self.snapshot.end]
        return (
            chain.snapshot.index == self.base
            and bool(covered)
            and covered[-1].end == self.snapshot.end
            and history_of(covered) == self.history
            and is_young(self.stored, now)
        )


class Offers:
    """The offers on this machine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @contextmanager
    def making(self, identity: StoreIdentity) -> Iterator[bool]:
        """While an offer of a store is made: whether no other process here is at it. Raises: DiskFull."""
        path = self._path(identity)
        with disk_errors(path):
            levels.make(self._services.task_directory(identity.task), identity.store)
        with disk_errors(path), exclusive_if_free(path.with_name(f"{path.name}.lock")) as is_free:
            yield is_free

    def make(self, identity: StoreIdentity, offer: Offer) -> None:
        """Leave an offer in place of an older one, while :meth:`making` one. Failing is no error: its blobs expire."""
        try:
            durable.write_note(self._path(identity), _to_json(offer))
        except OSError as error:
            log.warning("a snapshot was not saved for later commits on this machine: %s", error)

    def find(self, identity: StoreIdentity, chain: SegmentChain, now: Moment) -> Offer | None:
        """The offer that fits a published chain."""
        try:
            levels.check(self._services.task_directory(identity.task), identity.store)
            offer = _from_json(durable.read_note(self._path(identity), _OFFER_SIZE))
        except (OSError, InvalidError, ValueError, KeyError, TypeError):
            return None
        return offer if offer.fits(chain, now) else None

    def take_back(self, identity: StoreIdentity) -> None:
        """An offer turned out to be of no use."""
        with suppress(OSError):  # whatever else stands there is not read as an offer either
            self._path(identity).unlink()

    def _path(self, identity: StoreIdentity) -> Path:
        return self._services.task_directory(identity.task) / identity.store / _OFFER


def _to_json(offer: Offer) -> dict[str, Any]:
    index = offer.snapshot
    return {
        "snapshot": {"index": _ref(index.index), "state_id": index.state_id, "end": index.end},
        "base": _ref(offer.base),
        "history": offer.history.hex(),
        "blobs": offer.blobs,
        "stored": astuple(offer.stored),
    }


def _from_json(found: dict[str, Any]) -> Offer:
    snapshot = found["snapshot"]
    return Offer(
        ChainSnapshot(_blob(snapshot["index"]), snapshot["state_id"], snapshot["end"]),
        _blob(found["base"]),
        bytes.fromhex(found["history"]),
        tuple(found["blobs"]),
        Moment(*found["stored"]),
    )


def _ref(blob: BlobRef) -> dict[str, Any]:
    return asdict(blob) | {"hash": blob.hash.hex()}


def _blob(found: dict[str, Any]) -> BlobRef:
    return BlobRef(**found | {"hash": bytes.fromhex(found["hash"])})
