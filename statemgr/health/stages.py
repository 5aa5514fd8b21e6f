"""Migration: where the stores of a job are on the way from changelogs to blobs, and what their backends hold.

Reads only; fences nobody. :mod:`statemgr.model.jobs.stages` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import ConfigError, CorruptError, MissingError
from statemgr.flows.offers import why_useless
from statemgr.ids import task_index
from statemgr.model.checkpoint import BlobMarker, ChangelogMarker, CheckpointRecord, Marker
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.model.jobs.stages import BackendPosition, StorePosition, position_of, stage_of
from statemgr.services import Services

_AT_ONCE = 16
#: Offsets of each part of a changelog whose records tell the average size.
_SAMPLE = 500


@dataclass(frozen=True, slots=True)
class Held:
    """What a backend holds of one store of one task, by its newest marker.

    ``size``: bytes, of a changelog estimated from samples, with the records that compaction has not removed yet; None
    if nobody can say. ``taken_ms``: the time of the checkpoint (epoch milliseconds). ``problem``: why the backend could
    not be asked.
    """

    size: int | None = None
    taken_ms: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """One store of one task, and factory → what that backend holds.

    ``offer``: a first snapshot that waits until the owner opens the task with ``blob-store``.
    """

    position: StorePosition
    held: Mapping[str, Held] = field(default_factory=dict)
    offer: Offer | None = None

    @property
    def size(self) -> int:
        """The bytes of the state, if the blob store has the newest one; else those of the largest known copy."""
        is_known = any(one.factory == BLOB_STORE and not one.behind for one in self.position.backends)
        exact = self.held[BLOB_STORE].size if is_known else None
        return exact if exact is not None else max((held.size or 0 for held in self.held.values()), default=0)


def positions(
    services: Services, records: Iterable[CheckpointRecord], stores: Sequence[str] = ()
) -> list[StorePosition]:
    """Every store (of ``stores``, if any) of every record, in order."""
    found = []
    for record in records:
        for name in sorted(record.current.stores):
            config = services.config.stores.get(name)
            if not stores or name in stores:
                asked = stage_of(config.backup_factories, config.restore_factories) if config is not None else None
                found.append(position_of(record, name, asked))
    return found


def survey(
    services: Services, found: Sequence[StorePosition], offers: Mapping[OfferKey, Offer] | None = None
) -> list[StoreStatus]:
    """Ask the backends what they hold. ``offers``: all that are on the topic.

    Raises: UnavailableError, AccessDenied.
    """
    averages: dict[str, float] = {}
    for position in found:
        if position.store not in averages and (average := _record_size(services, position)) is not None:
            averages[position.store] = average
    catalogue = Catalogue(services.transfer)

    def ask(position: StorePosition) -> StoreStatus:
        average = averages.get(position.store, 0.0)
        held = {one.factory: _held(services, catalogue, position, one, average) for one in position.backends}
        return StoreStatus(position, held, _waiting(services, position, offers or {}))

    return services.in_parallel("survey", ask, found, _AT_ONCE)


def size_of(
    services: Services, catalogue: Catalogue, task: str, store: str, marker: Marker, average: float | None = None
) -> int | None:
    """The bytes that a backend holds for a marker, as in :class:`Held`.

    Args:
        average: bytes of an offset of the store's changelog, if somebody has sampled one.

    Raises: MissingError, CorruptError, ConfigError, UnavailableError, AccessDenied.
    """
    if isinstance(marker, ChangelogMarker):
        start = ChangelogRestore(services).start(marker)
        each = _sampled(services, marker, start, marker.offset) if average is None else average
        return round((marker.offset - start) * each)
    if isinstance(marker, BlobMarker):
        identity = services.identity(task, store)
        chain = catalogue.chain(identity, marker)
        snapshot = catalogue.index(identity, chain.snapshot.index).root.size
        return snapshot + sum(segment.size for segment in chain.segments)
    return None


def _held(
    services: Services, catalogue: Catalogue, position: StorePosition, backend: BackendPosition, average: float
) -> Held:
    if backend.newest is None:
        return Held()
    taken_ms = backend.newest.published_ms or backend.newest.checkpoint_id.millis
    marker = backend.newest.marker(backend.factory, position.store)
    assert marker is not None
    try:
        size = size_of(services, catalogue, position.record.task, position.store, marker, average)
    except (MissingError, CorruptError, ConfigError) as error:
        return Held(None, taken_ms, error.message)
    return Held(size, taken_ms)


def _waiting(services: Services, position: StorePosition, offers: Mapping[OfferKey, Offer]) -> Offer | None:
    """The offer that the owner of a store without a snapshot would adopt: the one that expires last."""
    record = position.record
    if record.current.marker(BLOB_STORE, position.store) is not None:
        return None
    of_store = (record.layout.generation, record.task, position.store)
    waiting = [
        offer
        for key, offer in offers.items()
        if (key.layout_generation, key.task, key.store) == of_store
        and why_useless(services, key, offer, record) is None
    ]
    return max(waiting, key=lambda offer: offer.expires_ms, default=None)


def _record_size(services: Services, position: StorePosition) -> float | None:
    """Average bytes of an offset of a store's changelog; None if it has none that is known here."""
    marker = position.record.current.marker(KAFKA_CHANGELOG, position.store)
    if not isinstance(marker, ChangelogMarker) or marker.partition != task_index(position.record.task):
        return None
    try:
        low, high = services.changelog().bounds(marker.topic, marker.partition)
        return _sampled(services, marker, low, min(high, marker.offset)) if low < min(high, marker.offset) else None
    except (MissingError, CorruptError):
        return None


def _sampled(services: Services, marker: ChangelogMarker, start: int, end: int) -> float:
    """Average bytes of an offset in a part of a changelog, from samples.

    The newest part is not compacted yet, and older parts have few records or many. So the samples are close together at
    both ends, and each counts for the part around it.
    """
    if start >= end:
        return 0.0
    part = (end - start) // 2
    cuts = {start, end}
    while part > _SAMPLE:
        cuts |= {start + part, end - part}
        part //= 4
    changelog, size = services.changelog(), 0.0
    for low, high in pairwise(sorted(cuts)):
        many = min(high - low, _SAMPLE)
        first = low + (high - low - many) // 2
        found = sum(batch.size for batch in changelog.changes(marker.topic, marker.partition, first, first + many))
        size += found * (high - low) / many
    return size / (end - start)
