"""``rescale``: a job gets another number of tasks with ``statemgr rescale``."""

from __future__ import annotations

from collections.abc import Iterator

from statemgr.config import JobConfig
from statemgr_tools.bench import records
from statemgr_tools.bench.backups import upload
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.jobs import publish
from statemgr_tools.bench.measure import Sample, interleaved
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone
from statemgr_tools.bench.session import Session, changed
from statemgr_tools.bench.states import state_of

_RECORDS = 5_000_000
_TARGET = Target("at least", 500_000, of="value")


@case("rescale")
def rescale(session: Session) -> Iterator[Line]:
    """Splitting one task with 5 million records on S3 into four, and merging them again, on two processes."""
    state = state_of(session, session.count(_RECORDS, least=20_000) * records.RECORD_SIZE)
    backup = upload(session, state, s3=True)
    job = JobConfig.from_mapping(backup.config.to_mapping(), session.servers.kafka())
    publish(job, backup.checkpoint)
    peaks: list[int] = []

    def to(tasks: int) -> Sample:
        # the old and new stores, and the tables between them, are on the disk at the same time
        with fresh_place(session, "rescaled", 3 * state.bytes) as (place, held):
            found = in_fresh_process(
                "statemgr_tools.bench.rescale_operations:rescale_job",
                config=changed(job, state__dir=str(place)).to_mapping(), tasks=tasks, held=str(held),
            )  # fmt: skip
        peaks.append(found["peak_bytes"])
        return {"seconds": found["seconds"], "rate": found["keys"] / found["seconds"]}

    found = interleaved(
        {"split": lambda _: to(4), "merge": lambda _: to(1)}, session.rounds, session.report, rotate=False
    )
    split, merge = (found[name].median("rate") for name in ("split", "merge"))
    yield alone("rescale", split, "records/s", f"from one task with {state} to four", _TARGET)
    yield alone("rescale", merge, "records/s", "from four tasks to one", _TARGET)
    yield alone("rescale", max(peaks) / 2**20, "MiB", "peak memory of the process without its two workers")
