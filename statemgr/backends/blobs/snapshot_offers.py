"""Offers: snapshots of published states, stored beside the attempts that went on from them, for later ones.

One file per store on this machine, below its task's directory, so that every process here finds it. It is a cache: what
is damaged, does not fit the published chain or waited too long is not used, and its blobs expire.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from statemgr.backends.blobs.writer_state import is_young
from statemgr.backends.services import BackendContext
from statemgr.errors import InvalidError
from statemgr.local import durable, levels
from statemgr.local.owners import exclusive_if_free
from statemgr.local.transfer_files import disk_errors
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.ports import Moment, StoreIdentity

log = logging.getLogger(__name__)
_FILE = "snapshot.offer"
#: Bytes; an offer names the blobs of one snapshot.
_MAX_SIZE = 64 * 1024 * 1024


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


def history_of(segments: Sequence[ChainSegment]) -> bytes:
    """XXH3-128 over the numbers and the content of segments, wherever they are stored."""
    contents = (segment.blob.hash if segment.blob else content_hash(segment.inline or b"") for segment in segments)
    return content_hash(
        "\n".join(f"{s.first} {s.end} {h.hex()}" for s, h in zip(segments, contents, strict=True)).encode()
    )


class Offers:
    """The offers on this machine."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context

    @contextmanager
    def making(self, identity: StoreIdentity) -> Iterator[bool]:
        """While an offer of a store is made: whether no other process here is at it. Raises: DiskFull."""
        path = self._path(identity)
        with disk_errors(path):
            levels.make(self._context.task_directory(identity.task), identity.store)
        with disk_errors(path), exclusive_if_free(path.with_name(f"{path.name}.lock")) as is_free:
            yield is_free

    def make(self, identity: StoreIdentity, offer: Offer) -> None:
        """Leave an offer in place of an older one, while :meth:`making` one. Failing is no error: its blobs expire."""
        text = json.dumps(_to_json(offer)).encode()
        try:
            durable.write_file(self._path(identity), content_hash(text).hex().encode() + b"\n" + text, synced=False)
        except OSError as error:
            log.warning("a snapshot is not offered on this machine: %s", error)

    def find(self, identity: StoreIdentity, chain: SegmentChain, now: Moment) -> Offer | None:
        """The offer that fits a published chain."""
        try:
            levels.check(self._context.task_directory(identity.task), identity.store)
            digest, _, text = durable.read_small(self._path(identity), _MAX_SIZE).partition(b"\n")
            if content_hash(text).hex().encode() != digest:
                return None
            offer = _from_json(json.loads(text))
        except (OSError, InvalidError, ValueError, KeyError, TypeError):
            return None
        return offer if offer.fits(chain, now) else None

    def take_back(self, identity: StoreIdentity) -> None:
        """An offer turned out to be of no use."""
        with suppress(OSError):  # whatever else stands there is not read as an offer either
            self._path(identity).unlink()

    def _path(self, identity: StoreIdentity) -> Path:
        return self._context.task_directory(identity.task) / identity.store / _FILE


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
