"""Materialize: build the first snapshot of a store from its changelog while the job runs, and offer it to the job.

Steps of :func:`materialize_store`:

1. read the checkpoint topic, which fences nobody; leave a store alone that has a snapshot, or an offer of one that its
   owner would adopt
2. build the state of the newest checkpoint from the changelog in a directory of its own
   (:mod:`statemgr.operations.materialize.build`)
3. upload its files, and then the index; all blobs have a TTL. Files that are final are uploaded during step 2
4. write the offer to the checkpoint topic, under a key of its own and without a transaction

A process that is killed leaves notes in the directory, and the next run on this machine continues. Blobs that no offer
names expire. The owner of the task adopts the offer when it opens the task (:mod:`statemgr.flows.offers`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from statemgr.backends.changelog.integrity import certain_ms
from statemgr.config.factories import BLOB_STORE
from statemgr.config.units import DAY_MS
from statemgr.errors import InvalidError, MissingState, RetryableError, UnavailableError
from statemgr.flows.committing.limits import SHORTEST_GRACE_MS
from statemgr.flows.offers import why_useless
from statemgr.ids import task_path
from statemgr.kafka.plain_writes import write_offer
from statemgr.local.machine import moment
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.operations.materialize.build import ChangelogBuild
from statemgr.operations.materialize.build_place import BuildPlace
from statemgr.operations.materialize.early_upload import EarlyUpload
from statemgr.operations.materialize.upload import store_snapshot
from statemgr.phases import Phase
from statemgr.ports import CheckpointLog, Progress
from statemgr.services import Services

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Materialized:
    """What happened to one store of one task.

    Attributes:
        offered: whether a new offer was written; if not, ``reason`` says why none was needed.
        checkpoint_id: the checkpoint whose state was offered, or the newest one.
        records: records that were replayed; ``size``: bytes of the snapshot's files; ``uploaded``: bytes of its blobs
            that this run uploaded.
        expires_ms: until when the offer may be adopted, by the broker's clock (epoch milliseconds).
        seconds: wall time.
    """

    task: str
    store: str
    offered: bool
    checkpoint_id: str
    reason: str | None = None
    records: int = 0
    size: int = 0
    uploaded: int = 0
    expires_ms: int | None = None
    seconds: float = 0.0


def check_possible(services: Services) -> None:
    """Raises: InvalidError if no owner of this job could use an offer; ConfigError without a blob store."""
    services.blobs()
    if services.config.snapshot_interval.is_every_commit:
        raise InvalidError(
            "with task.commit.snapshot.interval = '1 commit' no offer saves an upload: each commit uploads the files "
            "that the last snapshot lacks, and the job has none of the files of an offer",
            hint="remove task.commit.snapshot.interval until the job has made a snapshot of its own in the background, "
            "and set it again then",
            job=services.config.job_name,
        )


def why_not(services: Services, log: CheckpointLog, record: CheckpointRecord, store: str, *, again: bool) -> str | None:
    """Step 1: why a store needs no offer; None if it needs one. ``again``: although it has one. An offer that its owner
    would not adopt does not count: it has expired or lost a blob, or its changelog is another one by now.

    Raises: UnavailableError, AccessDenied, InvalidError if the brokers do not tell their time.
    """
    if record.current.marker(BLOB_STORE, store) is not None:
        return "its checkpoint has a snapshot"
    for key, offer in log.offers().items():
        if again or (key.layout_generation, key.task, key.store) != (record.layout.generation, record.task, store):
            continue
        why = why_useless(services, key, offer, record)
        if why is None:
            return f"an offer made from checkpoint {offer.checkpoint_id} waits for the owner"
        logger.info("%s/%s: an earlier offer cannot be adopted: %s", record.task, store, why)
    return None


def materialize_store(
    services: Services, log: CheckpointLog, task: str, store: str, progress: Progress, *, again: bool = False
) -> Materialized:
    """All steps for one store of one task.

    Raises: MissingState if there is no checkpoint, or the changelog cannot supply its state exactly; InvalidError for
        a configuration with which no offer is of use; UnavailableError, AccessDenied, DiskFull, CorruptError.
    """
    started = services.clock.monotonic()
    check_possible(services)
    identity, config = services.identity(task, store), services.config
    record = _record(services, log, task)
    if any(one.current.names_blobs for one in log.current().values()):
        services.expect_blobs()
    reason = why_not(services, log, record, store, again=again)  # 1
    if reason is not None:
        return Materialized(task, store, False, str(record.current.checkpoint_id), reason)

    def newest() -> Checkpoint:
        return _record(services, log, task).current

    def report(what: str, done: int, total: int) -> None:
        progress(f"{task} / {store}: {what}", done, total)

    identity.announce(Phase.MATERIALIZE)
    place = BuildPlace(config.state_dir, config.job_name, config.job_id, task_path(task), store)
    with place.held() as is_free:
        if not is_free:
            raise UnavailableError(
                "another process on this machine builds this snapshot",
                hint="wait for it, or end it",
                **identity.where,
            )
        with EarlyUpload(services, identity, place.directory) as early:
            built = ChangelogBuild(services, identity, place, newest).run(report, early.add)  # 2
            made = store_snapshot(services, identity, place, built.state_id, early, report)  # 3
        age_s = moment(services.clock).seconds_since(made.began)
        if age_s is None or age_s * 1000 > SHORTEST_GRACE_MS // 2:
            place.clear()
            raise RetryableError(
                "the upload took so long that garbage collection might delete its first blobs",
                hint="run the command again with a larger blob.store.parallelism, or with fewer tasks at a time",
                **identity.where,
            )
        lives_ms = min(certain_ms(built.delete_retention_ms), config.ttl_days * DAY_MS // 2)
        offer = Offer(
            built.checkpoint_id, built.state_id, made.index, built.marker, built.as_of_ms,
            built.as_of_ms + lives_ms,
        )  # fmt: skip
        identity.announce(Phase.OFFER)
        attempt = made.index.blob_id.split("/")[-2]
        key = OfferKey(config.job_name, config.job_id, record.layout.generation, task, store, attempt)
        written_ms = write_offer(config, key, offer)  # 4
        place.clear()
    if written_ms is not None and written_ms >= offer.expires_ms:
        raise RetryableError(
            "the offer has expired already",
            hint="raise delete.retention.ms of the changelog topic, and run the command again",
            **identity.where,
        )
    identity.announce(Phase.MATERIALIZED)
    return Materialized(
        task, store, True, str(built.checkpoint_id), None, built.records, made.size, made.uploaded, offer.expires_ms,
        services.clock.monotonic() - started,
    )  # fmt: skip


def stores_of(services: Services, records: Mapping[str, CheckpointRecord]) -> list[tuple[str, str]]:
    """The tasks and stores of the checkpoints that the configuration backs up at all."""
    durable = services.durable
    return [(task, store) for task, record in records.items() for store in record.current.stores if durable.get(store)]


def _record(services: Services, log: CheckpointLog, task: str) -> CheckpointRecord:
    record = log.read([task]).get(task)
    if record is None:
        raise MissingState(
            "the topic has no checkpoint of the task",
            hint="wait for its first commit; `statemgr checkpoints list` shows the tasks that have one",
            job=services.config.job_name,
            task=task,
            topic=services.config.checkpoint_topic,
        )
    return record
