"""``materialize``: a first snapshot from a changelog, compared with a restore from the same changelog."""

from __future__ import annotations

from collections.abc import Iterator

from statemgr_tools.bench.changelogs import FilledChangelog, filled_changelog
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.measure import Sample, interleaved
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.records import RECORD_SIZE
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, compared
from statemgr_tools.bench.session import Session, changed

_OPERATIONS = "statemgr_tools.bench.kafka_operations"


@case("materialize")
def materialize(session: Session) -> Iterator[Line]:
    """5 million records until their snapshot on S3 is offered, compared with restoring them from the changelog."""
    changelog = filled_changelog(session)
    found = interleaved(
        {
            "materialize": lambda number: _materialized(session, changelog),
            "restore": lambda number: _restored(session, changelog),
        },
        session.rounds,
        session.report,
    )
    ours, theirs = (found[name].median("rate") for name in ("materialize", "restore"))
    yield compared("materialize", ours, "records/s", "own changelog restore", theirs, Target("at least", 0.9))


def _materialized(session: Session, changelog: FilledChangelog) -> Sample:
    """Build and upload once on an empty machine, in a new process."""
    s3 = session.servers.s3()
    with fresh_place(session, "materialized", 2 * changelog.count * RECORD_SIZE) as (place, held):
        config = changed(changelog.config, state__dir=str(place))
        config = type(config).from_mapping({**config.to_mapping(), **s3.settings()})
        found = in_fresh_process(f"{_OPERATIONS}:materialize", config=config.to_mapping(), held=str(held))
    s3.remove(config.job_name)
    assert found["records"] == changelog.count, found
    return {"seconds": found["seconds"], "rate": changelog.count / found["alive"], "peak": found["peak_bytes"]}


def _restored(session: Session, changelog: FilledChangelog) -> Sample:
    with fresh_place(session, "elsewhere", 0) as (place, held):
        config = changed(changelog.config, state__dir=str(place)).to_mapping()
        found = in_fresh_process(f"{_OPERATIONS}:open_task", config=config, count=changelog.count, held=str(held))
    return {"seconds": found["seconds"], "rate": changelog.count / found["alive"]}
