"""``first-answer``, ``get-by-need``, ``time-to-whole``, ``first-second`` and ``store-get``: a store that is open before
all of its state is here.

The S3 server is behind a proxy that adds 24 ms to each request, and lets 200 MB/s through. A process opens the store by
need, reads one random key, reads more of them, and then fetches the rest. The whole restore has the same proxy. Some
lines are for a proxy that does not limit the bandwidth.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from statemgr.config import JobConfig
from statemgr_tools.bench import records
from statemgr_tools.bench.backups import Backup, backup_of
from statemgr_tools.bench.fresh import MeasurementFailed, in_fresh_process
from statemgr_tools.bench.jobs import publish
from statemgr_tools.bench.measure import Sample, interleaved, seconds
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.peers import slatedb
from statemgr_tools.bench.proxy import LATENCY_S, SlowProxy, fixed
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone, compared
from statemgr_tools.bench.seed import STORE
from statemgr_tools.bench.session import GIBIBYTE, MEBIBYTE, Session, changed
from statemgr_tools.bench.states import state_of

_BANDWIDTH = 200e6
_BEHIND = f"behind a proxy that adds {LATENCY_S * 1000:g} ms"
_LIMITED = f"{_BEHIND} and lets {_BANDWIDTH / 1e6:g} MB/s through"
_GETS = 200


@case("first-answer")
def first_answer(session: Session) -> Iterator[Line]:
    """4 GiB by need against the whole restore, and against 64 MiB."""
    small, large = (backup(session, size) for size in (64 * MEBIBYTE, 4 * GIBIBYTE))
    with ExitStack() as stack:
        limited, unlimited = (stack.enter_context(slow(session, limit)) for limit in (_BANDWIDTH, None))
        found = interleaved(
            {
                "small": lambda number: by_need(session, small, limited, number),
                "large": lambda number: by_need(session, large, limited, number),
                "whole": lambda _: whole_restore(session, large, limited),
                "fast": lambda number: by_need(session, large, unlimited, number),
                "fast whole": lambda _: whole_restore(session, large, unlimited),
            },
            session.rounds,
            session.report,
        )
    ours, whole = found["large"], found["whole"].median()
    first, until = f"s to the first value of {large.state}", f"s until all of {large.state} is here, with reads"
    answer = ours.median()
    yield alone("first-answer", answer, first, _LIMITED, Target("at most", 0.5, "value"))
    yield compared("first-answer", answer, first, "the whole restore", whole, Target("at most", 1 / 30))
    yield compared("first-answer", answer, first, f"of {small.state}", found["small"].median(), Target("at most", 1.5))
    reference = "opening SlateDB with as many records, and a get"
    answer = found["small"].median()
    slate = _slatedb(session, small) if slatedb.is_installed() else None
    yield compared("first-answer", answer, f"s to the first value of {small.state}", reference, slate)
    fast, fast_whole = found["fast"], found["fast whole"].median()
    yield compared("first-answer", fast.median(), f"{first}, {_BEHIND}", "the whole restore", fast_whole)
    one = f"a GET of 16 KiB {_LIMITED}"
    yield compared("get-by-need", ours.median("get"), "s, p50", one, ours.median("plain"), Target("at most", 1.3))
    yield compared("get-by-need", ours.median("late"), "s, p99", one, ours.median("plain"))
    target = Target("at most", 1.2)
    yield compared("time-to-whole", ours.median("complete"), until, "the whole restore", whole, target)
    yield compared("time-to-whole", fast.median("complete"), f"{until}, {_BEHIND}", "the whole restore", fast_whole)
    yield alone(
        "first-answer", ours.median("peak") / 1e6, "MB of memory at most", f"{large.state}, until all of it is here",
        Target("at most", 256, "value"),
    )  # fmt: skip


@case("first-second")
def first_second(session: Session) -> Iterator[Line]:
    """Updates of random existing keys in the first and the fifth second of a store of 4 GiB, and after the fill."""
    large = backup(session, 4 * GIBIBYTE)
    partly: list[dict[str, Any]] = []
    with slow(session, _BANDWIDTH) as proxy:

        def measure(number: int, *, whole: bool) -> Sample:
            found = _in_fresh_place(
                session, large, proxy, "first_second", of=large.state.records, seed=number, whole=whole
            )
            partly.extend([] if whole else [found])
            return {"seconds": 0.0, "after": float(found["after"])}

        found = interleaved(
            {
                "partial": lambda number: measure(number, whole=False),
                "whole": lambda number: measure(number, whole=True),
            },
            session.rounds,
            session.report,
        )
    whole = found["whole"].median("after")
    for second in (1, 5):
        rates = [run["rates"][second - 1] for run in partly if len(run["rates"]) >= second]
        if rates:
            yield compared("first-second", median(rates), f"updates in second {second}", "a whole state", whole)
    after = found["partial"].median("after")
    yield compared(
        "first-second", after, "updates a second after the fill", "a whole state", whole, Target("at least", 0.95)
    )


@case("store-get")
def store_get(session: Session) -> Iterator[Line]:
    """One key of 4 GiB in S3, read by ``statemgr store get``, with the start of its process."""
    large = backup(session, 4 * GIBIBYTE)
    published = changed(large.config, **session.servers.kafka())
    publish(published, large.checkpoint)

    def read(number: int, config: JobConfig) -> float:
        file = session.fresh("store-get") / "job.toml"
        # JSON's strings, numbers and arrays are TOML's
        file.write_text(
            "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in config.to_mapping().items())
        )
        key = random.Random(number).randrange(large.state.records)
        return seconds(partial(_store_get, file, f"0x{records.key(key).hex()}"))

    with slow(session) as proxy:
        distant = changed(published, blob__store__s3__endpoint=proxy.endpoint)
        found = interleaved(
            {"near": lambda number: read(number, published), "distant": lambda number: read(number, distant)},
            session.rounds,
            session.report,
        )
    command = f"s of `statemgr store get` on {large.state} in S3"
    yield alone("store-get", found["near"].median(), command, "", Target("at most", 1.0, "value"))
    yield alone("store-get", found["distant"].median(), command, _LIMITED)


def _store_get(file: Path, key: str) -> None:
    """Raises: MeasurementFailed."""
    command = [sys.executable, "-m", "statemgr", "store", "get", STORE, key, "--config", str(file)]
    run = subprocess.run([*command, "--key-serde", "bytes"], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise MeasurementFailed(f"the key was not read: {run.stderr.strip()[-2000:]}")


def _slatedb(session: Session, small: Backup) -> float:
    """Return the seconds of SlateDB's opening and first get, behind the same proxy."""
    session.report("filling SlateDB")
    address, module = session.servers.s3(), "statemgr_tools.bench.peers.slatedb"
    s3, count = asdict(address), small.state.records
    name = f"{address.prefix}/{session.fresh('slatedb').name}"
    in_fresh_process(f"{module}:fill", s3=s3, name=name, count=count)
    with slow(session) as proxy:
        s3["endpoint"] = proxy.endpoint
        answers = [
            float(in_fresh_process(f"{module}:first_answer", s3=s3, name=name, of=count, seed=number)["seconds"])
            for number in range(session.rounds)
        ]
    return median(answers)


def slow(session: Session, bandwidth: float | None = _BANDWIDTH) -> SlowProxy:
    """Return the proxy in front of the run's S3 server."""
    return SlowProxy(session.servers.s3().endpoint, fixed(LATENCY_S), bandwidth)


def backup(session: Session, size: int) -> Backup:
    """Return a backup in S3 of a state of this size."""
    return backup_of(session, state_of(session, session.bytes(size)), s3=True)


def by_need(session: Session, backup: Backup, proxy: SlowProxy, number: int) -> Sample:
    """Measure the first answer, further ones, and the time to whole."""
    found = _in_fresh_place(session, backup, proxy, "first_answer", of=backup.state.records, gets=_GETS, seed=number)
    return {
        **{name: float(found[name]) for name in ("seconds", "get", "late", "plain", "complete")},
        "peak": float(found["peak_bytes"]),
    }


def whole_restore(session: Session, backup: Backup, proxy: SlowProxy) -> float:
    """Return the seconds of a restore of everything."""
    return float(_in_fresh_place(session, backup, proxy, "restore")["seconds"])


def _in_fresh_place(
    session: Session, backup: Backup, proxy: SlowProxy, function: str, **arguments: Any
) -> dict[str, Any]:
    with fresh_place(session, "first-answer", backup.state.bytes) as (place, held):
        config = changed(backup.config, state__dir=str(place), blob__store__s3__endpoint=proxy.endpoint)
        return in_fresh_process(
            f"statemgr_tools.bench.operations:{function}",
            **{**backup.arguments(place), "config": config.to_mapping(), "held": str(held), **arguments},
        )
