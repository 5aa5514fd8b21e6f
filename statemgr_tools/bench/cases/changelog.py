"""``restore-changelog``, ``adopt``, ``blob-vs-changelog``, ``commit-changelog``: compared with Kafka Streams and Quix.

For Kafka Streams and statemgr, a restore counts from the start of its process until the store can be read. Quix, which
is slow, restores fewer records, and the start of its process does not count. Both are in its favour.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from statemgr.config import JobConfig
from statemgr_tools.bench import records
from statemgr_tools.bench.backups import upload
from statemgr_tools.bench.changelogs import FilledChangelog, filled_changelog
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.jobs import publish
from statemgr_tools.bench.measure import Sample, Series, Variant, interleaved
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone, compared
from statemgr_tools.bench.session import Session, changed
from statemgr_tools.bench.states import state_of

_QUIX_RECORDS = 500_000
_UPDATES, _EACH = 1_000_000, 100_000
_UNIT = "records/s"


@case("restore-changelog")
def restore_changelog(session: Session) -> Iterator[Line]:
    """5 million records until readable with normal options, compared with Kafka Streams, Quix and plain consumption."""
    changelog = filled_changelog(session)
    variants: dict[str, Variant] = {
        "restore": lambda number: _restored(session, changelog.config, changelog),
        "consumption": lambda number: _consumed(changelog),
    }
    variants |= _peers(session, changelog)
    found = interleaved(variants, session.rounds, session.report)
    ours = found["restore"].median("rate")
    streams, quix = (_rate(found.get(name)) for name in ("Kafka Streams", "Quix"))
    name = "restore-changelog"
    yield compared(name, ours, _UNIT, "Kafka Streams 4.3.1", streams, Target("at least", 1.5))
    yield compared(name, ours, _UNIT, "Quix Streams 3.28.1", quix, Target("at least", 12))
    yield compared(name, ours, _UNIT, "plain consumption", found["consumption"].median("rate"))
    peak = found["restore"].largest("peak") / 1e6
    yield alone(name, peak, "MB at most resident", "the same restores", Target("at most", 400, of="value"))


@case("adopt")
def adopt(session: Session) -> Iterator[Line]:
    """Adopting those 5 million records in place and reading the first one, compared with restoring them."""
    changelog = filled_changelog(session)

    def adopted(number: int) -> Sample:
        config = session.job(
            "adopted", task__backup__factories="kafka-changelog", task__inputs=[changelog.source],
            stores__s__changelog__topic=changelog.topic,
        )  # fmt: skip
        with fresh_place(session, "elsewhere", 0) as (place, held):
            found = in_fresh_process(
                "statemgr_tools.bench.kafka_operations:adopt_and_open",
                config=changed(config, state__dir=str(place)).to_mapping(), count=changelog.count, held=str(held),
                topic=changelog.topic, source=changelog.source,
            )  # fmt: skip
        return {"alive": found["alive"]}

    variants: dict[str, Variant] = {
        "adopt": adopted,
        "restore": lambda number: _restored(session, changelog.config, changelog),
    }
    found = interleaved(variants, session.rounds, session.report)
    ours, restore = found["adopt"].median("alive"), changelog.count / found["restore"].median("rate")
    unit = f"s, {changelog.count:,} records in place"
    yield compared("adopt", ours, unit, "restore-changelog", restore, Target("at most", 1.3))


@case("blob-vs-changelog")
def blob_vs_changelog(session: Session) -> Iterator[Line]:
    """Opening a task from a snapshot on S3, compared with its changelog of the same 5 million records."""
    changelog = filled_changelog(session)
    state = state_of(session, changelog.count * records.RECORD_SIZE)
    backup = upload(session, state, s3=True)
    config = JobConfig.from_mapping(backup.config.to_mapping(), session.servers.kafka())
    publish(config, backup.checkpoint)
    found = interleaved(
        {
            "blobs": lambda number: _restored(session, config, changelog, state.bytes),
            "changelog": lambda number: _restored(session, changelog.config, changelog, state.bytes),
        },
        session.rounds,
        session.report,
    )
    ours, theirs = (changelog.count / found[name].median() for name in ("blobs", "changelog"))
    yield compared("blob-vs-changelog", ours, _UNIT, "own changelog restore", theirs, Target("at least", 5))


@case("commit-changelog")
def commit_changelog(session: Session) -> Iterator[Line]:
    """A million updates to a store and its changelog, one transaction per 100,000, compared with Quix Streams."""
    count = session.count(_UPDATES, least=2000)
    each = max(count * _EACH // _UPDATES // 1000, 1) * 1000

    def ours(number: int) -> float:
        config = session.job("commits", task__backup__factories="kafka-changelog")
        found = in_fresh_process(
            "statemgr_tools.bench.kafka_operations:commits", config=config.to_mapping(), count=count, each=each
        )
        shutil.rmtree(config.state_dir)
        return float(found["seconds"])

    variants: dict[str, Variant] = {"commits": ours}
    quix = session.peers.quix()
    if quix is not None:
        broker = str(session.servers.kafka()["kafka.bootstrap.servers"])
        work = session.fresh("quix")
        variants["Quix"] = lambda number: float(quix.commits(broker, count, each, work)["s"])
    found = interleaved(variants, session.rounds, session.report)
    theirs = count / found["Quix"].median() if "Quix" in found else None
    unit = f"updates/s, {count:,} in transactions of {each:,}"
    reference = "Quix Streams 3.28.1 in transactions"
    yield compared(
        "commit-changelog", count / found["commits"].median(), unit, reference, theirs, Target("at least", 3)
    )


def _restored(session: Session, config: JobConfig, changelog: FilledChangelog, held_bytes: int = 0) -> Sample:
    """Restore once on an empty machine, in a new process."""
    with fresh_place(session, "elsewhere", held_bytes) as (place, held):
        found = in_fresh_process(
            "statemgr_tools.bench.kafka_operations:open_task",
            config=changed(config, state__dir=str(place)).to_mapping(), count=changelog.count, held=str(held),
        )  # fmt: skip
    rate = changelog.count / found["alive"]
    return {"seconds": found["seconds"], "rate": rate, "peak": found["peak_bytes"]}


def _consumed(changelog: FilledChangelog) -> Sample:
    found = in_fresh_process(
        "statemgr_tools.bench.kafka_operations:consume", config=changelog.config.to_mapping(), topic=changelog.topic
    )
    return {"seconds": found["seconds"], "rate": found["records"] / found["alive"]}


def _peers(session: Session, changelog: FilledChangelog) -> dict[str, Variant]:
    work = session.fresh("peers")
    variants: dict[str, Variant] = {}
    streams, quix = session.peers.streams(), session.peers.quix()
    if streams is not None:

        def restore_streams(number: int) -> Sample:
            found = streams.restore(changelog.broker, changelog.app, changelog.source, changelog.count, work)
            return {"rate": changelog.count / float(found["s"])}

        variants["Kafka Streams"] = restore_streams
    if quix is not None:
        count = session.count(_QUIX_RECORDS, least=20_000)
        topic = f"{changelog.app}-quix"
        quix.load(changelog.broker, topic, count, work)

        def restore_quix(number: int) -> Sample:
            return {"rate": float(quix.restore(changelog.broker, topic, count, work)["restore_rec_s"])}

        variants["Quix"] = restore_quix
    return variants


def _rate(series: Series | None) -> float | None:
    return None if series is None else series.median("rate")
