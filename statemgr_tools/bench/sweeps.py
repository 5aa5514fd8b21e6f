"""How costs grow with the state's size, the amount of changes, the number of files, and the store's latency.

Each sweep yields the curves of one picture, with the same measurements as the cases of the table.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from statemgr_tools.bench import records
from statemgr_tools.bench.backups import backup_of
from statemgr_tools.bench.cases.first_answer import backup, by_need, slow, whole_restore
from statemgr_tools.bench.cases.restore import restored
from statemgr_tools.bench.jobs import SEGMENTS, SNAPSHOTS, task_at, to_blobs
from statemgr_tools.bench.measure import seconds
from statemgr_tools.bench.proxy import FLIP_158, Latencies, SlowProxy, fixed
from statemgr_tools.bench.seed import STORE
from statemgr_tools.bench.session import MEBIBYTE, Session
from statemgr_tools.bench.states import State, many_files, state_of

KINDS = (SEGMENTS, SNAPSHOTS)
_UPDATES = 10_000
_SMALL = 64 * MEBIBYTE
_WARM_UP = 2
#: Copies of a state on the disk while its restore is measured: the state, its backup and what is restored.
_COPIES = 3.5


@dataclass(frozen=True, kw_only=True)
class Curve:
    """``label``: points (x, seconds). x is a number or a text."""

    label: str
    points: Sequence[tuple[float | str, float]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Curves with the same meaning of x."""

    title: str
    x: str
    curves: Sequence[Curve]
    logarithmic: bool = True


def all_sweeps(session: Session) -> Iterator[Picture]:
    """Measure every picture."""
    yield _by_state(session)
    yield _by_changes(session)
    yield _by_files(session)
    yield _by_latency(session)
    yield _by_need(session)


def _by_state(session: Session) -> Picture:
    sizes = [session.bytes(size * MEBIBYTE) for size in (16, 64, 256, 1024)]
    curves = [
        Curve(
            label=f"commit, {kind}",
            points=[(size / MEBIBYTE, _commit(session, kind, state_of(session, size))) for size in sizes],
        )
        for kind in KINDS
    ]
    restores = [(size / MEBIBYTE, _restore(session, state_of(session, size))) for size in sizes]
    title = f"A commit of {session.count(_UPDATES):,} updates, and a restore"
    return Picture(title=title, x="state, MiB", curves=[*curves, Curve(label="restore", points=restores)])


def _by_changes(session: Session) -> Picture:
    state = state_of(session, session.bytes(_SMALL))
    counts = [session.count(count, least=10) for count in (100, 1000, 10_000, 100_000)]
    curves = [
        Curve(
            label=f"commit, {kind}",
            points=[(count, _commit(session, kind, state, updates=count)) for count in counts],
        )
        for kind in KINDS
    ]
    return Picture(title=f"A commit on {state}", x="updates", curves=curves)


def _by_files(session: Session) -> Picture:
    states = [many_files(session, session.count(count, least=10)) for count in (10, 100, 1000, 10_000)]
    restores = [(len(state.files), _restore(session, state)) for state in states]
    idle = [(len(state.files), _commit(session, SNAPSHOTS, state, updates=0)) for state in states]
    curves = [Curve(label="restore", points=restores), Curve(label="commit, nothing changed", points=idle)]
    return Picture(title="Small files", x="files", curves=curves)


def _by_latency(session: Session) -> Picture:
    state = state_of(session, session.bytes(_SMALL))
    stores: list[Latencies | None] = [None, fixed(0.02), fixed(0.1), FLIP_158]
    curves = []
    for kind in KINDS:
        points: list[tuple[float | str, float]] = []
        for latencies in stores:
            with SlowProxy(session.servers.s3().endpoint, latencies) as proxy:
                took = _commit(session, kind, state, endpoint=proxy.endpoint)
            points.append((latencies.name if latencies else "none", took))
        curves.append(Curve(label=f"commit, {kind}", points=points))
    title = f"A commit of {session.count(_UPDATES):,} updates on {state}"
    return Picture(title=title, x="latency added to every request", curves=curves, logarithmic=False)


def _by_need(session: Session) -> Picture:
    first: list[tuple[float | str, float]] = []
    whole: list[tuple[float | str, float]] = []
    with slow(session) as proxy:
        for size in (64, 256, 1024, 4096, 16384):
            if _COPIES * session.bytes(size * MEBIBYTE) > shutil.disk_usage(session.directory).free:
                session.report(f"no space for a state of {size} MiB")
                break
            made = backup(session, size * MEBIBYTE)
            x = made.state.bytes / MEBIBYTE
            session.report(f"the first answer of {made.state}")
            answers = [by_need(session, made, proxy, number)["seconds"] for number in range(session.rounds)]
            first.append((x, statistics.median(answers)))
            whole.append((x, whole_restore(session, made, proxy)))
    curves = [Curve(label="first value, by need", points=first), Curve(label="whole restore", points=whole)]
    return Picture(title="S3 with 24 ms and 200 MB/s", x="state, MiB", curves=curves)


def _commit(
    session: Session, kind: str, state: State, *, updates: int | None = None, endpoint: str | None = None
) -> float:
    """Return the median time of some commits, in seconds."""
    count = session.count(_UPDATES) if updates is None else updates
    session.report(f"{kind}: commits of {count:,} updates on {state}")
    settings = to_blobs(kind)
    if endpoint is not None:
        settings["blob.store.s3.endpoint"] = endpoint
    config = session.job("sweep", s3=True, overrides=settings)
    times: list[float] = []
    with task_at(config, state) as task:
        for number in range(-_WARM_UP, 3 * session.rounds):
            if count:
                task.store(STORE).put_many(records.updates(count, of=state.records, seed=number + 1000))
            times.append(seconds(partial(task.commit, {})))
    shutil.rmtree(config.state_dir)
    return statistics.median(times[_WARM_UP:])


def _restore(session: Session, state: State) -> float:
    backup = backup_of(session, state, s3=True)
    return statistics.median(restored(session, backup)["seconds"] for _ in range(session.rounds))
