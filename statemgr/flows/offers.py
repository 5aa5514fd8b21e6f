"""Offers of first snapshots, as the owner of a task and garbage collection see them.

``statemgr materialize`` builds the first snapshot of a store from its changelog and offers it on the checkpoint topic.
An owner that opens the task adopts the offer, instead of uploading the whole state with its next commit:

1. choose the newest live offer of each store that is to be backed up to blobs and has no snapshot there, or an older
   one if something of that is missing or damaged
2. check that all blobs of the snapshot exist, and store the changes that the changelog has had since as segments
3. check again that the offer is live: only then is it certain that no delete was missing from the changelog
4. return a prepared commit of the same state and the same input offsets, with the new markers (``publish`` is the next
   flow); its transaction deletes the offers

Why the adopted chain has exactly the checkpoint's state: the snapshot has the state at an offset of the changelog, and
the segments have every change from there to the checkpoint's marker. Deletes among them are younger than the
offer says. The cleaner keeps them for ``delete.retention.ms``, and the offer expires before that.

Why garbage collection spares the blobs: an offer names only blobs that were younger than half the shortest grace period
when it was written, so garbage collection that began earlier leaves them alone. A later run finds the offer, until a
whole grace period after it has expired. An adoption begins before the expiry. It is published within half a grace
period (:mod:`statemgr.flows.committing.limits`), or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from statemgr.backends.blobs.offered import OfferedSnapshots
from statemgr.config import StoreConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import CorruptError, MissingError, StatemgrError
from statemgr.flows.committing.commit import CommitBase
from statemgr.flows.committing.limits import SHORTEST_GRACE_MS
from statemgr.flows.opening.repair import can_repair, carried_stores
from statemgr.model.chain import ChainSnapshot
from statemgr.model.checkpoint import Attachment, ChangelogMarker, Checkpoint, CheckpointRecord
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.phases import Phase
from statemgr.ports import PreparedBackup
from statemgr.services import Services

log = logging.getLogger(__name__)
_Offers = Mapping[OfferKey, Offer]


@dataclass(frozen=True)
class Adoption:
    """A prepared commit, and the offers that are no longer needed after it."""

    base: CommitBase
    commit: PreparedCommit
    offers: tuple[OfferKey, ...]


# --- the owner ----------------------------------------------------------------------------------------------------


def wants_offer(services: Services, store: StoreConfig, checkpoint: Checkpoint) -> bool:
    """Whether the next commit would upload the whole state of a store, although a changelog has that state, too."""
    return (
        BLOB_STORE in store.backup_factories
        and not services.config.snapshot_interval.is_every_commit
        and store.name in checkpoint.stores
        and checkpoint.marker(BLOB_STORE, store.name) is None
        and isinstance(checkpoint.marker(KAFKA_CHANGELOG, store.name), ChangelogMarker)
    )


def prepare_adoption(
    services: Services,
    offers: _Offers,
    record: CheckpointRecord,
    base: CommitBase,
    *,
    attachments: tuple[Attachment, ...] = (),
    together: bool,
) -> Adoption | None:
    """All steps, for the stores of one task; None if there is no offer to adopt.

    Args:
        together: whether all tasks of the job are published together. Then the commit also stands for a task without an
            offer.

    Raises: UnavailableError, AccessDenied, DiskFull.
    """
    config, checkpoint = services.config, record.current
    chosen = _chosen(services, offers, record)  # 1
    if not chosen and not together:
        return None
    if base.refill or not can_repair(services, record):
        return None
    carried, refill = carried_stores(services, base, record)
    without = {name for name, store in carried.items() if not store.has_backup}
    if refill or not without <= chosen.keys():
        return None  # first a commit has to fill a backend: none that the configuration names has a store
    stores, added, size = dict(carried), list[str](), 0
    adopted = set()
    for store, offered in chosen.items():
        tried = (_continued(services, record, store, offer, together=together) for offer in offered)
        made = next((one for one in tried if one is not None), None)  # 2, 3
        if made is None:
            continue
        assert made.marker is not None
        before = carried[store]
        stores[store] = PreparedStore(before.state_id, {**before.markers, BLOB_STORE: made.marker}, before.changes)
        added += made.added_blobs
        size += made.added_bytes
        adopted.add(store)
    if not without <= adopted or not (adopted or together):
        return None
    attempt = services.ids.attempt_id()
    commit = PreparedCommit(  # 4
        config.job_name, config.job_id, record.task, base.layout, base.epoch, attempt, str(checkpoint.checkpoint_id),
        checkpoint.input_offsets, stores, tuple(added), attachments, added_bytes=size,
        input_topic_ids=checkpoint.input_topic_ids,
    )  # fmt: skip
    return Adoption(base, commit, tuple(key for key in offers if key.task == record.task and key.store in adopted))


def _chosen(services: Services, offers: _Offers, record: CheckpointRecord) -> dict[str, list[Offer]]:
    """Store → the offers that it can adopt, the newest first."""
    found: dict[str, list[Offer]] = {}
    of_task = [(key, offer) for key, offer in offers.items() if key.task == record.task]
    for key, offer in sorted(of_task, key=lambda item: (item[1].changelog.offset, item[0].attempt), reverse=True):
        store = services.config.stores.get(key.store)
        if store is None or not wants_offer(services, store, record.current):
            continue
        why = _unusable(services, key, offer, record)
        if why is None:
            found.setdefault(key.store, []).append(offer)
        else:
            log.warning("%s: the offer of a first snapshot is not adopted: %s", f"{key.task}/{key.store}", why)
    return found


def _continued(
    services: Services, record: CheckpointRecord, store: str, offer: Offer, *, together: bool
) -> PreparedBackup | None:
    """Steps 2 and 3 for one store: its snapshot and a segment of the changes since then; None if it is of no use."""
    identity, checkpoint = services.identity(record.task, store), record.current
    identity.announce(Phase.ADOPT_OFFER)
    marker = checkpoint.marker(KAFKA_CHANGELOG, store)
    assert isinstance(marker, ChangelogMarker)
    batches = services.changelog().changes(marker.topic, marker.partition, offer.changelog.offset, marker.offset)
    snapshot = ChainSnapshot(offer.index, offer.state_id, 0)
    try:
        made = OfferedSnapshots(services).continued(
            identity, checkpoint.stores[store], snapshot, batches, together=together
        )
        live = is_live(services, offer)
    except (MissingError, CorruptError) as error:
        log.warning("%s: the offer of a first snapshot cannot be used: %s", identity, error)
        return None
    if not live:
        log.warning("%s: the offer of a first snapshot expired while it was read", identity)
        return None
    return made


def why_useless(services: Services, key: OfferKey, offer: Offer, record: CheckpointRecord) -> str | None:
    """Why an owner that opens the task now would not adopt an offer; None if it would. Looks at every blob of it.

    Raises: UnavailableError, AccessDenied, InvalidError if the brokers do not tell their time.
    """
    why = _unusable(services, key, offer, record)
    if why is None:
        try:
            OfferedSnapshots(services).whole(services.identity(key.task, key.store), offer.index)
        except (MissingError, CorruptError) as error:
            return str(error)
    return why


def _unusable(services: Services, key: OfferKey, offer: Offer, record: CheckpointRecord) -> str | None:
    """Why the current checkpoint cannot begin with an offer; None if it can. Looks at no blob."""
    marker, changelog = record.current.marker(KAFKA_CHANGELOG, key.store), offer.changelog
    if not isinstance(marker, ChangelogMarker):
        return "the checkpoint has no changelog of the store"
    if key.layout_generation != record.layout.generation:
        return "the job has another number of tasks by now"
    if (marker.topic, marker.partition) != (changelog.topic, changelog.partition):
        return "the store has another changelog by now"
    topic_id = marker.topic_id
    try:
        topic_id = topic_id or services.changelog().describe(marker.topic).topic_id
        if topic_id != changelog.topic_id:
            return "its changelog was deleted and created again"
        if changelog.start != marker.start:
            return "the whole state was written to its changelog again"  # a key that it had lost has no delete
        if changelog.offset > marker.offset:
            return "the checkpoint is older than the snapshot"
        return None if is_live(services, offer) else "it has expired"
    except MissingError as error:
        return error.message


def is_live(services: Services, offer: Offer, *, extra_ms: int = 0) -> bool:
    """Whether an offer may still be adopted, or could have been adopted ``extra_ms`` ago.

    Raises: UnavailableError, AccessDenied, InvalidError if the brokers do not tell their time.
    """
    return services.changelog().time_ms() < offer.expires_ms + extra_ms


# --- garbage collection -------------------------------------------------------------------------------------------


def offered_blobs(services: Services, offers: _Offers) -> Iterator[str]:
    """The blobs of offers. One whose index is lost has none, because nobody can adopt it.

    Raises: UnavailableError, AccessDenied for an index that cannot be read.
    """
    snapshots = OfferedSnapshots(services)
    for key, offer in offers.items():
        try:
            yield from snapshots.blobs_of(services.identity(key.task, key.store), offer.index)
        except (MissingError, CorruptError) as error:
            log.warning("%s: an offer of a first snapshot is damaged: %s", f"{key.task}/{key.store}", error)


def expired_offers(services: Services, offers: _Offers) -> Collection[OfferKey]:
    """The offers that expired more than a grace period ago; none if the brokers do not tell their time."""
    if not offers:
        return ()
    try:
        return [key for key, offer in offers.items() if not is_live(services, offer, extra_ms=SHORTEST_GRACE_MS)]
    except StatemgrError as error:
        log.warning("the brokers do not tell their time, so that all offers are kept: %s", error)
        return ()
