"""What a publish must not exceed: the size of its records, and the age of its blobs. No I/O.

- **Size.** A job whose checkpoint records could get too large is refused at its start instead of at a later commit. The
  records are encoded once with the largest possible values, with the real codec.
- **Age.** Garbage collection deletes blobs that no retained checkpoint references and that are older than a grace
  period. Nothing references the blobs of a commit until it is published. So a publish must come while its blobs are
  young: one that refers to blobs older than half the shortest grace period is refused. The other half is for clocks
  that differ and for transactions whose outcome is settled late. So when garbage collection begins, every blob older
  than the grace period is either needed by a published checkpoint, or will never be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.config.job import RECORD_LIMITS
from statemgr.config.units import DAY_MS, HOUR_MS
from statemgr.errors import ConfigError, InvalidError, MissingBlob, RetryableError
from statemgr.ids import CheckpointId, IdSource, attempt_millis, task_name
from statemgr.model import codecs
from statemgr.model.chain import ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import (
    MOST_HOST,
    MOST_KEPT,
    Attachment,
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Layout,
    Marker,
    OutstandingTtl,
    Owner,
)
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.commit import PreparedCommit
from statemgr.model.record_size import (
    MOST_OUTSTANDING,
    MOST_RECORD,
    inline_attachments_limit,
    inline_chain_limit,
    most_partitions,
)

#: The shortest permitted grace period, and the default one. Publishers rely on it.
SHORTEST_GRACE_MS = DAY_MS
_ATTEMPT = "1700000000000-0123456789abcdef"
_MOST = 2**62
#: Bytes that a request adds to a record.
_AROUND = 1024
#: Bytes of an outstanding TTL without the name of its blob: the length of the name, and the time.
_OF_TTL = 2 + 10
#: Bytes by which the length of a long list is longer than that of a list of one.
_OF_LIST = 4
#: The clocks of two machines may differ by this much before the blob store's clock is asked.
_CLOCKS_DIFFER_MS = 10 * 60 * 1000


def check_config(config: JobConfig) -> None:
    """Raises: ConfigError if a task's record could get too large for the topic or for the producer."""
    size = largest_size(config)
    if size > MOST_RECORD:
        raise ConfigError(
            f"the checkpoint record of a task with {len(config.stores)} stores may need {size} bytes, "
            f"but the limit is {MOST_RECORD}",
            hint="use fewer stores (stores.<name>.*), or shorter names of stores and topics",
            key="stores",
        )
    if config.most_record_bytes < MOST_RECORD + _AROUND:
        key = next(key for key in RECORD_LIMITS if key in config.values)
        raise ConfigError(
            f"{key} leaves {config.most_record_bytes} bytes for a record, but a checkpoint may need "
            f"{MOST_RECORD + _AROUND}",
            hint="raise it, or remove the key",
            key=key,
        )


def check_inputs(config: JobConfig, inputs: Inputs) -> None:
    """Raises: InvalidError if the job has too many input partitions for a record, whatever their offsets are."""
    most = most_partitions(_settings_size(config))
    if len(inputs.offsets) > most:
        raise InvalidError(
            f"the input has {len(inputs.offsets)} partitions, but the job record of a checkpoint has room for {most}",
            hint="split the job, or use input topics with fewer partitions (task.inputs)",
            job=config.job_name,
            key="task.inputs",
        )


def _settings_size(config: JobConfig) -> int:
    return sum(
        2 * (len(name) + 2 + sum(len(f) + 2 for f in (*store.backup_factories, *store.restore_factories))) + 64
        for name, store in config.stores.items()
    )


def largest_size(config: JobConfig) -> int:
    """Bytes of a task's record with the largest possible value in every field, and :data:`MOST_OUTSTANDING` TTLs."""
    blob = longest_blob(config)
    size = sum(map(len, codecs.encode_record(largest(config, blob, 1))[0]))
    # outstanding TTLs have the same size each, so only one is encoded
    return size + _OF_LIST + (MOST_OUTSTANDING - 1) * (len(blob.encode()) + _OF_TTL)


def longest_blob(config: JobConfig) -> str:
    """The longest name that a blob of the job may have."""
    longest = max((len(name) for name in config.stores), default=0)
    task = task_name(config.tasks - 1)
    return f"{config.job_key}/{task}/{'s' * longest}/{_ATTEMPT}/000000000.sst.00000"


def largest(config: JobConfig, blob: str, outstanding: int) -> CheckpointRecord:
    """A task's record with the largest possible value in every field, and as many outstanding TTLs of ``blob``."""
    task = task_name(config.tasks - 1)
    prefix = f"{config.job_key}/{task}"
    markers: dict[str, dict[str, Marker]] = {}
    for name, store in config.stores.items():
        for factory in store.backup_factories:
            markers.setdefault(factory, {})[name] = _marker(config, factory, name, f"{prefix}/{name}")
    checkpoint = Checkpoint(
        checkpoint_id=CheckpointId(1_700_000_000_000, 0),
        sequence=_MOST,
        epoch=_MOST,
        input_offsets={f"{topic}-{config.tasks - 1}": _MOST for topic in config.inputs},
        stores={name: f"{_ATTEMPT}-{name}" for name in config.stores},
        state_checkpoint_markers=markers,
        backup_factories={name: store.backup_factories for name, store in config.stores.items()},
        restore_factories={name: store.restore_factories for name, store in config.stores.items()},
        attachments=(Attachment("output", inline=bytes(inline_attachments_limit(1))),),
        outstanding_ttl=(OutstandingTtl(blob, _MOST),) * outstanding,
        kept=(str(CheckpointId(1_700_000_000_000, 0)),) * MOST_KEPT,
        owner=Owner("h" * MOST_HOST, _MOST, "v" * MOST_HOST),
        serdes={
            name: (store.key_serde, store.value_label(store.value_serde + " v00000"))
            for name, store in config.stores.items()
        },
    )
    layout = Layout(1, config.tasks, "p" * 200)
    return CheckpointRecord(config.job_name, config.job_id, task, layout, (checkpoint,))


def _marker(config: JobConfig, factory: str, store: str, prefix: str) -> Marker:
    if factory == KAFKA_CHANGELOG:
        topic = config.stores[store].changelog_topic
        return ChangelogMarker(topic, "A" * 22, config.tasks, _MOST, _MOST, _MOST)
    index = BlobRef(f"{prefix}/{_ATTEMPT}/index-1", _MOST, bytes(16), _MOST)
    snapshot = ChainSnapshot(index, f"{_ATTEMPT}-{store}", _MOST)
    # a chain without segments is inline whatever its size
    chain = SegmentChain(
        config.job_name, config.job_id, task_name(config.tasks - 1), store, snapshot.state_id, _ATTEMPT, _ATTEMPT,
        _MOST, snapshot, added=(index.blob_id,),
    )  # fmt: skip
    return BlobMarker(inline=bytes(max(len(codecs.encode_chain(chain)), inline_chain_limit(len(config.stores), 1))))


def chosen_grace_ms(config: JobConfig, wanted_ms: int | None) -> int:
    """The grace period to use. Raises: InvalidError if ``wanted_ms`` is shorter than publishers rely on."""
    if wanted_ms is not None and wanted_ms < SHORTEST_GRACE_MS:
        raise InvalidError(
            f"a grace period of {wanted_ms // 1000} s is too short: a commit in progress would lose its blobs",
            hint=f"choose at least {SHORTEST_GRACE_MS // HOUR_MS} h",
            job=config.job_name,
        )
    return SHORTEST_GRACE_MS if wanted_ms is None else wanted_ms


def check_young(
    config: JobConfig, ids: IdSource, commit: PreparedCommit, age_in_store: Callable[[Collection[str]], int]
) -> None:
    """Refuse to publish a commit whose blobs are too old.

    The clocks of the machine that began the commit and of the one that publishes it give its age. If they say that it
    is old, or from the future, the blob store's clock decides, as it does for garbage collection.

    Args:
        age_in_store: how long ago the oldest of some blobs was written, in milliseconds by the store's own clock.

    Raises: RetryableError if garbage collection might delete the commit's blobs, or one of them is gone.
    """
    began_ms = attempt_millis(commit.attempt)
    if not commit.added_blobs or began_ms is None:
        return
    limit_ms = SHORTEST_GRACE_MS // 2
    age_ms = ids.time_ns() // 1_000_000 - began_ms
    if not -_CLOCKS_DIFFER_MS < age_ms <= limit_ms:
        try:
            age_ms = age_in_store(commit.added_blobs)
        except MissingBlob as error:
            raise RetryableError(
                f"a blob of the commit was deleted before it could be published: {error.message}",
                hint="find out who deletes blobs, or correct this machine's clock; the next commit has the changes of "
                "this one",
                **{"job": config.job_name, "task": commit.task, **error.where},
            ) from error
    if age_ms > limit_ms:
        raise RetryableError(
            f"the commit began {age_ms // 1000} s ago: its blobs may be deleted as garbage at any time",
            hint="make batches smaller, or correct this machine's clock; the next commit has the changes of this one",
            job=config.job_name,
            task=commit.task,
        )
