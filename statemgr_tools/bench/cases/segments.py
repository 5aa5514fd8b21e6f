"""``commit-vs-state``, ``commit-bytes``, ``commit-bytes-200``, ``commit-requests`` and ``restore-segments``.

The first four measure the cost of a commit of changes, the last one the cost of a restore from such commits. Commits
are segments of changes (with snapshots between them if the case says so), the store is an S3 server, the task a
long-lived owner. Bytes are those of the bodies of PUTs. The pause is the time for which a commit blocks the task.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from statemgr.engine import checkpoint_from_bytes
from statemgr.engine.task import Task
from statemgr_tools.bench import records
from statemgr_tools.bench.backups import backup_of
from statemgr_tools.bench.cases.restore import restored
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.jobs import SEGMENTS, SNAPSHOTS, task_at, to_blobs
from statemgr_tools.bench.measure import Sample, Series, Variant, interleaved, percentile
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.requests import Requests, counted
from statemgr_tools.bench.result import Line, Target, alone, compared
from statemgr_tools.bench.seed import STORE
from statemgr_tools.bench.session import GIBIBYTE, MEBIBYTE, Session, changed
from statemgr_tools.bench.states import State, state_of

_UPDATES = 10_000
_FEW_UPDATES = 10
_SMALL = 64 * MEBIBYTE
#: Number of commits from which a 99th percentile is taken.
_COMMITS = 120
_WARM_UP = 3
#: Number of commits that may follow a snapshot by default.
_SEGMENTS = 50


@case("commit-vs-state")
def commit_vs_state(session: Session) -> Iterator[Line]:
    """A commit after 10,000 updates on 1 GiB, compared with the same on 64 MiB; and its pause."""
    found = _of_sizes(session)
    large, small = found["large"], found["small"]
    what, beside = (str(state_of(session, session.bytes(size))) for size in (GIBIBYTE, _SMALL))
    name, reference, target = "commit-vs-state", f"the same commit on {beside}", Target("at most", 1.2)
    yield compared(name, large.median() * 1e3, f"ms, {what}", reference, small.median() * 1e3, target)
    of_bytes = (series.median("bytes") / 1e6 for series in (large, small))
    yield compared(name, next(of_bytes), f"MB, {what}", reference, next(of_bytes), target)
    pause = percentile([sample["pause"] for sample in large.samples], 0.99) * 1e3
    unit = f"ms of pause, p99 of {len(large.samples)}"
    yield alone(name, pause, unit, f"beyond applying the write batch, {what}", Target("at most", 10, of="value"))


@case("commit-bytes")
def commit_bytes(session: Session) -> Iterator[Line]:
    """The uploaded bytes of a commit of 10,000 updates, compared with the bytes of the changed keys and values."""
    found = _of_sizes(session)["large"]
    changed = session.count(_UPDATES, least=_FEW_UPDATES) * records.RECORD_SIZE / 1e6
    ours = found.median("bytes") / 1e6
    yield compared("commit-bytes", ours, "MB a commit", "changed keys and values", changed, Target("at most", 1.1))


@case("commit-bytes-200")
def commit_bytes_200(session: Session) -> Iterator[Line]:
    """Bytes uploaded over 200 commits of 10,000 updates on 64 MiB, snapshots included; at most a fifth is expected."""
    commits = session.count(200, least=5)
    uploaded = {}
    for kind in (SEGMENTS, SNAPSHOTS):
        with _task(session, kind, _SMALL) as (task, state), counted() as sent:
            for number in range(commits):
                session.report(f"{kind}, commit {number + 1} of {commits}")
                _update(session, task, state, number)
                task.commit({})
            uploaded[kind] = sent.settled()["bytes"] / 1e6
    unit = f"MB uploaded, {commits} commits"
    yield compared("commit-bytes-200", uploaded[SEGMENTS], unit, SNAPSHOTS, uploaded[SNAPSHOTS])


@case("commit-requests")
def commit_requests(session: Session) -> Iterator[Line]:
    """The PUTs and LISTs of a commit of 10 updates, for both kinds of commit."""
    for kind in (SEGMENTS, SNAPSHOTS):
        with _task(session, kind, _SMALL) as (task, state), counted() as sent:

            def measure(number: int, task: Task = task, state: State = state, sent: Requests = sent) -> Sample:
                return _commit(session, task, state, sent, number, _FEW_UPDATES)

            found = interleaved({kind: measure}, 5 * session.rounds, session.report)[kind]
        for method, most in (("PUT", 1), ("LIST", 0)):
            target = Target("at most", most, of="value")
            yield alone("commit-requests", found.median(method), f"{method} a commit", f"{kind}, 10 updates", target)


@case("restore-segments")
def restore_segments(session: Session) -> Iterator[Line]:
    """1 GiB from a snapshot and as many segments as the default allows, compared with the snapshot alone."""
    state = state_of(session, session.bytes(GIBIBYTE))
    snapshot = backup_of(session, state, s3=True)
    place, count = session.fresh("segments"), session.count(_UPDATES, least=_FEW_UPDATES)
    session.report(f"restore-segments, {_SEGMENTS} commits of {count:,} updates")
    never = changed(snapshot.config, task__commit__snapshot__interval="1000000 commits")
    found = in_fresh_process(
        "statemgr_tools.bench.operations:commit_segments",
        **replace(snapshot, config=never).arguments(place), of=state.records, count=count, commits=_SEGMENTS,
    )  # fmt: skip
    shutil.rmtree(place)
    segments = replace(snapshot, checkpoint=checkpoint_from_bytes(bytes.fromhex(found["checkpoint"])))
    variants: dict[str, Variant] = {
        SEGMENTS: lambda number: restored(session, segments),
        SNAPSHOTS: lambda number: restored(session, snapshot),
    }
    times = interleaved(variants, session.rounds, session.report)
    unit, alone_ = f"s, {state} and {_SEGMENTS} segments of {count:,} updates", "the snapshot alone"
    target = Target("at most", 1.15)
    yield compared("restore-segments", times[SEGMENTS].median(), unit, alone_, times[SNAPSHOTS].median(), target)


def _of_sizes(session: Session) -> dict[str, Series]:
    """Commits of 10,000 updates on 1 GiB and on 64 MiB, in turn, measured once per run."""
    return session.shared("commits of sizes", lambda: _measure_sizes(session))


def _measure_sizes(session: Session) -> dict[str, Series]:
    commits = session.count(_COMMITS, least=5)
    with (
        _task(session, SEGMENTS, GIBIBYTE) as (large, large_state),
        _task(session, SEGMENTS, _SMALL) as (small, small_state),
        counted() as sent,
    ):
        variants: dict[str, Variant] = {
            "large": lambda number: _commit(session, large, large_state, sent, number),
            "small": lambda number: _commit(session, small, small_state, sent, number),
        }
        return interleaved(variants, commits, session.report, warm_up=_WARM_UP)


@contextmanager
def _task(session: Session, kind: str, size: int) -> Iterator[tuple[Task, State]]:
    """Return a task of its own job that starts from a state of this size."""
    state = state_of(session, session.bytes(size))
    config = session.job(kind, s3=True, overrides=to_blobs(kind))
    with task_at(config, state) as task:
        yield task, state
    shutil.rmtree(config.state_dir)


def _commit(session: Session, task: Task, state: State, sent: Requests, number: int, updates: int = _UPDATES) -> Sample:
    _update(session, task, state, number, updates)
    sent.settled()
    sent.reset()
    start = time.perf_counter()
    future = task.commit_async({})
    pause = time.perf_counter() - start
    future.result()
    took = time.perf_counter() - start
    return {"seconds": took, "pause": pause, "PUT": 0.0, "LIST": 0.0, **sent.settled()}


def _update(session: Session, task: Task, state: State, number: int, updates: int = _UPDATES) -> None:
    """Write the updates. They are applied at once, because a list this long is its own write batch."""
    pairs = records.updates(session.count(updates, least=_FEW_UPDATES), of=state.records, seed=number + 1000)
    task.store(STORE).put_many(pairs)
