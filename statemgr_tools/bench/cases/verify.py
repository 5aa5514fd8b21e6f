"""``verify``: the content hash of a changelog and of blobs, as ``statemgr migrate verify`` computes it."""

from __future__ import annotations

from collections.abc import Iterator

from statemgr.config import JobConfig
from statemgr_tools.bench import records
from statemgr_tools.bench.backups import upload
from statemgr_tools.bench.changelogs import FilledChangelog, filled_changelog
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.jobs import publish
from statemgr_tools.bench.measure import Sample, interleaved
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone, compared
from statemgr_tools.bench.session import Session, changed
from statemgr_tools.bench.states import state_of

_UNIT = "records/s"
#: Number of messages that statemgr consumes at once. More cost more, because they exceed the processor's caches.
_SMALL_BATCH = 500


@case("verify")
def verify(session: Session) -> Iterator[Line]:
    """Hashing the same 5 million records in a changelog and in a snapshot on S3, on two processes."""
    changelog = filled_changelog(session)
    state = state_of(session, changelog.count * records.RECORD_SIZE)
    backup = upload(session, state, s3=True)
    blobs = JobConfig.from_mapping(backup.config.to_mapping(), session.servers.kafka())
    publish(blobs, backup.checkpoint)
    found = interleaved(
        {
            "changelog": lambda number: _hashed(session, changelog.config, "kafka-changelog"),
            "consumption": lambda number: _consumed(changelog),
            "consumption in small batches": lambda number: _consumed(changelog, batch=_SMALL_BATCH),
            "blobs": lambda number: _hashed(session, blobs, "blob-store", state.bytes),
        },
        session.rounds,
        session.report,
    )
    ours = found["changelog"].median("rate")
    plain, small = (found[f"consumption{name}"].median("rate") for name in ("", " in small batches"))
    yield compared("verify", ours, _UNIT, "plain consumption", plain, Target("at least", 0.9))
    yield compared("verify", ours, _UNIT, f"plain consumption, {_SMALL_BATCH} messages at a time", small)
    rate = found["blobs"].median("rate")
    yield alone("verify", rate, _UNIT, f"a snapshot of {state} on S3", Target("at least", 800_000, of="value"))


def _hashed(session: Session, config: JobConfig, factory: str, held_bytes: int = 0) -> Sample:
    with fresh_place(session, "elsewhere", held_bytes) as (place, held):
        found = in_fresh_process(
            "statemgr_tools.bench.kafka_operations:hash_backend",
            config=changed(config, state__dir=str(place)).to_mapping(), factory=factory, held=str(held),
        )  # fmt: skip
    return {"seconds": found["seconds"], "rate": found["keys"] / found["seconds"]}


def _consumed(changelog: FilledChangelog, **batch: int) -> Sample:
    found = in_fresh_process(
        "statemgr_tools.bench.kafka_operations:consume",
        config=changelog.config.to_mapping(), topic=changelog.topic, **batch,
    )  # fmt: skip
    return {"seconds": found["seconds"], "rate": found["records"] / found["seconds"]}
