"""``first-answer``, ``get-by-need`` and ``time-to-whole``: a store is open before all of its state is here.

The S3 server is behind a proxy that adds 24 ms to each request. A process opens the store by need, reads one random
key, reads more of them, and then fetches the rest. The whole restore has the same proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from statemgr_tools.bench.backups import Backup, backup_of
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.measure import Sample, interleaved
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.proxy import LATENCY_S, SlowProxy, fixed
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, compared
from statemgr_tools.bench.session import GIBIBYTE, MEBIBYTE, Session, changed
from statemgr_tools.bench.states import state_of

_GETS = 200


@case("first-answer")
def first_answer(session: Session) -> Iterator[Line]:
    """4 GiB by need against the whole restore, and against 64 MiB."""
    sizes = {"small": session.bytes(64 * MEBIBYTE), "large": session.bytes(4 * GIBIBYTE)}
    backups = {name: backup_of(session, state_of(session, size), s3=True) for name, size in sizes.items()}
    large = str(backups["large"].state)
    with SlowProxy(session.servers.s3().endpoint, fixed(LATENCY_S)) as proxy:
        found = interleaved(
            {
                "small": lambda number: _by_need(session, backups["small"], proxy, number),
                "large": lambda number: _by_need(session, backups["large"], proxy, number),
                "whole": lambda number: _whole(session, backups["large"], proxy),
            },
            session.rounds,
            session.report,
        )
    ours, whole = found["large"], found["whole"]
    behind = f"behind a proxy that adds {LATENCY_S * 1000:g} ms"
    first = f"s to the first value of {large}, {behind}"
    yield compared("first-answer", ours.median(), first, "the whole restore", whole.median(), Target("at most", 1 / 30))
    yield compared(
        "first-answer", ours.median(), f"s to the first value of {large}", f"of {backups['small'].state}",
        found["small"].median(), Target("at most", 1.5),
    )  # fmt: skip
    one = f"a GET of 16 KiB {behind}"
    yield compared("get-by-need", ours.median("get"), "s, p50", one, ours.median("plain"), Target("at most", 1.3))
    yield compared(
        "time-to-whole", ours.median("complete"), f"s until all of {large} is here", "the whole restore",
        whole.median(), Target("at most", 1.2),
    )  # fmt: skip


def _arguments(backup: Backup, proxy: SlowProxy, place: Any) -> dict[str, Any]:
    arguments = backup.arguments(place)
    config = changed(backup.config, state__dir=str(place), blob__store__s3__endpoint=proxy.endpoint)
    return {**arguments, "config": config.to_mapping()}


def _by_need(session: Session, backup: Backup, proxy: SlowProxy, number: int) -> Sample:
    with fresh_place(session, "by-need", backup.state.bytes) as (place, held):
        found = in_fresh_process(
            "statemgr_tools.bench.operations:first_answer",
            **_arguments(backup, proxy, place), of=backup.state.records, gets=_GETS, seed=number, held=str(held),
        )  # fmt: skip
    return {name: float(found[name]) for name in ("seconds", "get", "plain", "complete")}


def _whole(session: Session, backup: Backup, proxy: SlowProxy) -> float:
    with fresh_place(session, "whole", backup.state.bytes) as (place, held):
        arguments = _arguments(backup, proxy, place)
        return float(
            in_fresh_process("statemgr_tools.bench.operations:restore", **arguments, held=str(held))["seconds"]
        )
