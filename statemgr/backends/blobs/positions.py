"""At which point of its segment chain each local directory of a store is: a restore begins there, not at the snapshot.

One file per store on this machine, next to its directories. It is a cache, of the last few states: what is damaged, or
does not fit the published chain, is not used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from statemgr.backends.blobs.snapshot_offers import history_of
from statemgr.backends.services import BackendContext
from statemgr.local import durable
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.ports import StoreIdentity

log = logging.getLogger(__name__)
_FILE = "positions.json"
_MOST = 8
_MAX_SIZE = 64 * 1024


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

    def __init__(self, context: BackendContext, identity: StoreIdentity) -> None:
        self._path: Path = context.task_directory(identity.task) / identity.store / _FILE

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
            with durable.open_file(self._path) as file:  # a regular file, whatever stands there
                data: bytes = file.read(_MAX_SIZE + 1)
            digest, _, text = data.partition(b"\n")
            if len(data) > _MAX_SIZE or content_hash(text).hex().encode() != digest:
                return []
            return [Position(**found) for found in json.loads(text)]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self, positions: Sequence[Position]) -> None:
        text = json.dumps([asdict(position) for position in positions[:_MOST]]).encode()
        try:
            durable.write_file(self._path, content_hash(text).hex().encode() + b"\n" + text, synced=False)
        except OSError as error:
            log.warning("the positions of local directories are not noted: %s", error)
