"""``commit-s3`` and ``commit-idle``: single commits to an S3 server, compared with Samza's of the same files.

Every commit is a snapshot (``1 commit``). The task is a long-lived owner, as in production. Its time includes the
flush, the checkpoint directory, the transaction and the clean-up. Samza's time includes the diff, the upload and the
clean-up of its harness, without the start of its JVM.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from statemgr.config import JobConfig
from statemgr.engine.task import Task
from statemgr_tools.bench import records
from statemgr_tools.bench.jobs import SNAPSHOTS, committed_files, task_at, to_blobs
from statemgr_tools.bench.measure import Sample, Series, Variant, interleaved, seconds
from statemgr_tools.bench.peers.harnesses import requests
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.requests import Requests, counted
from statemgr_tools.bench.result import Line, Target, compared
from statemgr_tools.bench.seed import STORE
from statemgr_tools.bench.session import GIBIBYTE, Session
from statemgr_tools.bench.states import State, many_files, state_of

_UPDATES = 10_000
_FILES = 10_000
_SAMZA = "Samza 1.8, same files"


@case("commit-s3")
def commit_s3(session: Session) -> Iterator[Line]:
    """A commit after 10,000 updates on 1 GiB: its time and its requests, compared with Samza's."""
    state = state_of(session, session.bytes(GIBIBYTE))
    count = session.count(_UPDATES)

    def update(task: Task, number: int) -> None:
        task.store(STORE).put_many(records.updates(count, of=state.records, seed=number + 1000))

    ours, samza = _beside_samza(session, state, update, rounds=3 * session.rounds)
    time, calls = (samza.median(), samza.median("all")) if samza else (None, None)
    unit = f"s, commit of {count:,} updates"
    yield compared("commit-s3", ours.median(), unit, _SAMZA, time, Target("at most", 0.5))
    unit = "requests, untagging and deletes counted"
    yield compared("commit-s3", ours.median("all"), unit, _SAMZA, calls, Target("at most", 0.334))


@case("commit-idle")
def commit_idle(session: Session) -> Iterator[Line]:
    """A commit of 10,000 unchanged files, compared with Samza's."""
    state = many_files(session, session.count(_FILES, least=500))
    ours, samza = _beside_samza(session, state, lambda task, number: None, rounds=session.rounds)
    unit = f"s, {len(state.files):,} files, nothing changed"
    time = samza.median() if samza else None
    yield compared("commit-idle", ours.median(), unit, _SAMZA, time, Target("at most", 0.01))


def _beside_samza(
    session: Session, state: State, update: Callable[[Task, int], None], rounds: int
) -> tuple[Series, Series | None]:
    """Commits of a task that starts from ``state``, each followed by Samza's commit of the same files."""
    config = session.job("commit", s3=True, overrides=to_blobs(SNAPSHOTS))
    with task_at(config, state) as task, counted() as sent:
        variants: dict[str, Variant] = {"commit": lambda number: _commit(task, sent, lambda: update(task, number))}
        samza = _samza_commit(session, config, task)
        if samza is not None:
            variants["Samza"] = samza
        # Always in this order, because Samza's files are those of the commit before it.
        found = interleaved(variants, rounds, session.report, rotate=False)
    shutil.rmtree(config.state_dir)
    return found["commit"], found.get("Samza")


def _commit(task: Task, sent: Requests, update: Callable[[], None]) -> Sample:
    update()
    sent.settled()
    sent.reset()
    took = seconds(lambda: task.commit({}))
    return {"seconds": took, **sent.settled()}


def _samza_commit(session: Session, config: JobConfig, task: Task) -> Variant | None:
    peer = session.peers.samza()
    if peer is None:
        return None
    run = peer.on(session.servers.s3(), session.bucket("commit"))
    index = session.fresh("samza") / "index"
    before = committed_files(config, task, index.parent / "before")
    run.measure("full", before, index)

    def measure(number: int) -> Sample:
        after = committed_files(config, task, index.parent / f"after-{number}")
        printed = run.measure("commit", after, index)
        Path(f"{index}.next").rename(index)
        shutil.rmtree(after)
        return {"seconds": float(printed["whole_s"]), "all": requests(printed)}

    return measure
