"""``spark-…``: batches of a stateful query compared with Spark's own state engine, on the same input in one run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from statemgr import JobConfig
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.measure import percentile
from statemgr_tools.bench.proxy import LATENCY_S, SlowProxy, fixed
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, compared, of_rounds
from statemgr_tools.bench.session import Session

_TASKS = 2
_ROWS = 20_000
_KEYS = 2_000_000
#: Spark's Python processors would need half an hour to fill two million keys.
_PROCESSOR_KEYS = 100_000
_BATCHES = 30
_LONG = 200
_ENDS = 20
#: The number of customers in the online-retail data, whose batches the case imitates.
_FEW_KEYS = 4_070
_MANY_ROWS = 50_000
_MANY_TASKS, _MANY_PARTITIONS, _SLOTS = 200, 1_000, 4
_EXECUTORS, _SPREAD_TASKS = 3, 6
_ENGINES = ("statemgr", "spark")

_TOTALS = {
    "type": "record",
    "name": "totals",
    "fields": [{"name": "total", "type": ["null", "long"]}, {"name": "rows", "type": ["null", "long"]}],
}

Times = dict[str, list[float]]


@case("spark-vectorised")
def spark_vectorised(session: Session) -> Iterator[Line]:
    """Running totals of few keys with many rows per batch, with Spark's aggregation as the reference."""
    rows, keys = session.count(_MANY_ROWS), session.count(_FEW_KEYS)
    times = _times(session, "aggregate", keys=keys, rows=rows, batches=_batches(session), engines=_ENGINES)
    yield from _against_spark(
        session, "spark-vectorised", times, "Spark's groupBy().agg", Target("at most", 0.9), Target("at most", 1.0)
    )


@case("spark-large")
def spark_large(session: Session) -> Iterator[Line]:
    """Running totals with Spark's aggregation as the reference, on 2 million keys."""
    times = _large(session)
    yield from _against_spark(
        session, "spark-large", times, "Spark's groupBy().agg", Target("at most", 0.8), Target("at most", 1.0)
    )


@case("spark-grow")
def spark_grow(session: Session) -> Iterator[Line]:
    """A batch of statemgr on 2 million keys, and on 20,000."""
    few = _times(session, "aggregate", keys=session.count(_ROWS), batches=_batches(session), engines=_ENGINES[:1])
    large, small = median(_large(session)["statemgr"]), median(few["statemgr"])
    yield compared("spark-grow", large * 1000, "ms a batch", "on 20,000 keys", small * 1000, Target("at most", 1.2))


@case("spark-processor")
def spark_processor(session: Session) -> Iterator[Line]:
    """One StatefulProcessor on both engines, with rows and with data frames. The floor of data frames is what the
    processor's own code takes, and a batch of columns for the rest."""
    keys = session.count(_PROCESSOR_KEYS)
    rows, count = min(keys, session.count(_ROWS)), _batches(session)
    for api, target in (("row", Target("at most", 0.18)), ("pandas", None)):
        times = _times(session, api, keys=keys, batches=count, engines=_ENGINES)
        yield from _against_spark(session, "spark-processor", times, f"transformWithState, {api}", target)
    columns = _times(session, "aggregate", keys=keys, batches=count, engines=_ENGINES[:1])["statemgr"]
    found: dict[str, Any] = in_fresh_process(
        "statemgr_tools.bench.spark_operations:measure_frames", keys=keys, rows=rows, tasks=_TASKS, batches=count
    )
    floor = [batch + median(found["own"]) for batch in columns]
    yield of_rounds(
        "spark-processor", "ms a batch, median, pandas", "its floor: the processor on frames that are there",
        _rounds(session, times["statemgr"], floor), Target("at most", 1.1),
    )  # fmt: skip


@case("spark-200")
def spark_200(session: Session) -> Iterator[Line]:
    """The last 20 of 200 batches of statemgr, and the first 20."""
    count, ends = session.count(_LONG, least=4), session.count(_ENDS, least=2)
    keys = session.count(_KEYS)
    found = _times(session, "aggregate", keys=keys, batches=count, engines=_ENGINES[:1])["statemgr"]
    first, last = median(found[:ends]) * 1000, median(found[-ends:]) * 1000
    yield compared("spark-200", last, f"ms a batch, last {ends}", f"first {ends}", first, Target("at most", 1.1))


@case("spark-restart")
def spark_restart(session: Session) -> Iterator[Line]:
    """The time from the start of a query with an empty disk to the end of its first batch."""
    keys, rows = session.count(_KEYS), session.count(_ROWS)
    session.report(f"restart, {keys:,} keys, {session.rounds} rounds of {' and '.join(_ENGINES)}")
    config = _job(session, _TASKS, s3=True)
    found: dict[str, Any] = in_fresh_process(
        "statemgr_tools.bench.spark_operations:measure_restart",
        config=config.to_mapping(), engines=list(_ENGINES), keys=keys, rows=rows, rounds=session.rounds,
        directory=str(session.fresh("spark")),
    )  # fmt: skip
    ours, theirs = (median(found[engine]) for engine in _ENGINES)
    reference = "Spark's groupBy().agg, its state in a local directory"
    yield compared("spark-restart", ours, "s, first batch, state on S3", reference, theirs, Target("at most", 0.2))


@case("spark-location")
def spark_location(session: Session) -> Iterator[Line]:
    """Running totals with everything that lasts on a distant S3 server, where both engines can have their location."""
    keys, rows = session.count(_FEW_KEYS), session.count(_MANY_ROWS)
    engines = (*_ENGINES, "statemgr-kept")
    session.report(f"location on S3, {keys:,} keys, {_batches(session)} batches of {', '.join(engines)}")
    with SlowProxy(session.servers.s3().endpoint, fixed(LATENCY_S)) as proxy:
        config = _job(session, _TASKS, s3=True, overrides={"blob.store.s3.endpoint": proxy.endpoint})
        found: dict[str, Any] = in_fresh_process(
            "statemgr_tools.bench.spark_operations:measure",
            config=config.to_mapping(), api="aggregate", engines=list(engines), keys=keys, rows=rows,
            batches=_batches(session), directory=str(session.fresh("spark")), s3=True,
        )  # fmt: skip
    where = f"ms a batch, S3 behind a proxy that adds {LATENCY_S * 1000:g} ms"
    for engine, reference, target in (
        ("spark", "Spark's groupBy().agg with its location there", Target("at most", 0.5)),
        ("statemgr-kept", "statemgr with its location there", None),
    ):
        rounds = _rounds(session, found["statemgr"], found[engine])
        yield of_rounds("spark-location", where, reference, rounds, target)


@case("spark-affinity")
def spark_affinity(session: Session) -> Iterator[Line]:
    """The bytes that executors with their own disks fetch in a batch."""
    keys, rows = session.count(_KEYS), session.count(_ROWS)
    session.report(f"{_EXECUTORS} executors, {keys:,} keys, {_batches(session)} batches")
    disks = {"state.dir": "${env:SPARK_EXECUTOR_DIRS}/state"}
    config = _job(session, _SPREAD_TASKS, overrides=disks)
    found: dict[str, Any] = in_fresh_process(
        "statemgr_tools.bench.spark_operations:measure_fetches",
        config=config.to_mapping(), executors=_EXECUTORS, keys=keys, rows=rows, batches=_batches(session),
        directory=str(session.fresh("spark")),
    )  # fmt: skip
    fetched, changed = (sum(found[name]) / len(found[name]) / 1e6 for name in ("fetched", "changed"))
    yield compared(
        "spark-affinity", fetched, "MB fetched a batch", "changed keys and values", changed, Target("at most", 1.5)
    )


@case("spark-many")
def spark_many(session: Session) -> Iterator[Line]:
    """The share of a batch that statemgr spends outside of the process function."""
    tasks, partitions = session.count(_MANY_TASKS, least=4), session.count(_MANY_PARTITIONS, least=8)
    session.report(f"{tasks} tasks, {partitions} partitions")
    config = _job(session, tasks)
    found: dict[str, Any] = in_fresh_process(
        "statemgr_tools.bench.spark_operations:measure_share",
        config=config.to_mapping(), slots=_SLOTS, partitions=partitions, rows=session.count(_ROWS),
        batches=max(session.rounds, 2), directory=str(session.fresh("spark")),
    )  # fmt: skip
    ours, whole = median(found["statemgr"]), median(found["batch"])
    reference = f"the whole batch of {tasks} tasks on {_SLOTS} slots, {partitions:,} input partitions"
    yield compared("spark-many", ours, "s in statemgr", reference, whole, Target("at most", 0.05))


def _large(session: Session) -> Times:
    found: Times = session.shared(
        "spark-large",
        lambda: _times(session, "aggregate", keys=session.count(_KEYS), batches=_batches(session), engines=_ENGINES),
    )
    return found


def _job(session: Session, tasks: int, *, totals: bool = True, **more: Any) -> JobConfig:
    """A job for the function of the aggregations, which needs serdes, or for a processor, which writes bytes."""
    settings: dict[str, Any] = {"job__tasks": tasks, "task__backup__factories": "blob-store", **more}
    if totals:
        settings |= {
            "stores__s__key__serde": "string",
            "stores__s__value__serde": "avro",
            "stores__s__value__avro__schemas": [json.dumps(_TOTALS)],
        }
    return session.job("spark", **settings)


def _batches(session: Session) -> int:
    return max(_BATCHES, session.rounds) if session.full else session.count(_BATCHES, least=2)


def _times(
    session: Session, api: str, *, keys: int, batches: int, engines: Sequence[str], rows: int | None = None
) -> Times:
    """Return engine → seconds of its warm batches."""
    session.report(f"{api}, {keys:,} keys, {batches} batches of {' and '.join(engines)}")
    config = _job(session, _TASKS, totals=api == "aggregate")
    found: dict[str, Any] = in_fresh_process(
        "statemgr_tools.bench.spark_operations:measure",
        config=config.to_mapping(), api=api, engines=list(engines), keys=keys,
        rows=rows or min(keys, session.count(_ROWS)), batches=batches, directory=str(session.fresh("spark")),
    )  # fmt: skip
    return {engine: found[engine] for engine in engines}


def _rounds(session: Session, ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float, float]]:
    """Return the medians of both engines' seconds in milliseconds, for each round: an equal part of all batches."""
    size = max(1, len(ours) // session.rounds)
    parts = [slice(start, start + size) for start in range(0, len(ours) - size + 1, size)]
    return [(median(ours[part]) * 1000, median(theirs[part]) * 1000) for part in parts]


def _against_spark(
    session: Session, name: str, times: Times, reference: str, middle: Target | None, tail: Target | None = None
) -> Iterator[Line]:
    rounds = _rounds(session, times["statemgr"], times["spark"])
    yield of_rounds(name, "ms a batch, median", reference, rounds, middle)
    ours, theirs = ([second * 1000 for second in times[engine]] for engine in _ENGINES)
    p95 = percentile(ours, 0.95)
    yield compared(name, p95, "ms a batch, p95", reference, percentile(theirs, 0.95), tail)
