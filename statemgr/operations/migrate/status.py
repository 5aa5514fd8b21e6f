"""``statemgr migrate status``: in which stage the stores of a job are, by its checkpoints. Fences nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE
from statemgr.ids import task_index
from statemgr.model.jobs.stages import stage_text
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import console, duration, print_json, print_table, size

if TYPE_CHECKING:
    from statemgr.health.stages import Held, StoreStatus
    from statemgr.model.checkpoint import CheckpointRecord
    from statemgr.model.jobs.stages import Stage

#: More rows than this are grouped, so that they fit on a screen.
_MOST_ROWS = 16


@click.command("status", short_help="Show the stage of every task and store.")
@job_options("tasks")
def status_command(call: Call) -> None:
    """Show the stage of every task and store, what is missing, and what each backend holds."""
    from statemgr.health.stages import positions, survey
    from statemgr.model.jobs.stages import published_together, step_forward
    from statemgr.reader import JobReader
    from statemgr.wiring import open_services

    config = call.config
    with closing(open_services(config)) as services, JobReader(config, only_settled=True) as reader:
        records = reader.retaining(None, call.tasks)
        found = survey(services, positions(services, records), reader.offers())
        now_ms = services.clock.time_ns() // 1_000_000
    if call.as_json:
        print_json([_json(config, one, published_together(records), now_ms) for one in found])
        return
    _print(found, now_ms)
    step = step_forward([one.position for one in found])
    if step is not None and step.written:
        console().print(f"the configuration asks for stage {step.target.title}: restart the job", markup=False)
    absent = config.tasks - len(records)
    if absent and not call.tasks:
        console().print(f"{absent} of {config.tasks} tasks have no checkpoint yet", markup=False)


def _print(found: Sequence[StoreStatus], now_ms: int) -> None:
    alone: Callable[[StoreStatus], object] = id
    key = _alike if len(found) > _MOST_ROWS else alone
    ordered = sorted(found, key=lambda one: str(key(one))) if key is _alike else list(found)
    rows = [_row(list(group), now_ms) for _, group in groupby(ordered, key)]
    columns = ("tasks", "store", "stage", "missing", "backends", "epoch", "last commit")
    print_table(columns, rows, empty="no checkpoints yet")


def _alike(one: StoreStatus) -> object:
    """What stores must have in common to be shown in one line."""
    position = one.position
    behind = tuple((backend.factory, backend.behind) for backend in position.backends)
    problems = tuple(held.problem for held in one.held.values())
    return position.store, stage_text(position), position.missing, behind, problems, one.offer is None


def _row(group: Sequence[StoreStatus], now_ms: int) -> tuple[object, ...]:
    first = group[0].position
    names = [task_index(one.position.record.task) for one in group]
    epochs = sorted({one.position.record.current.epoch for one in group})
    commits = sorted(_ages(one.position.record, now_ms) for one in group)
    return (
        ", ".join(_ranges(sorted(names))),
        first.store,
        stage_text(first),
        ", ".join(first.missing),
        "; ".join([*(_backend(group, place, now_ms) for place in range(len(first.backends))), *_offer(group, now_ms)]),
        epochs[-1] if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}",
        f"{duration(commits[-1])} ago",
    )


def _backend(group: Sequence[StoreStatus], place: int, now_ms: int) -> str:
    """For example ``blob-store current, 1.2 GB, 5 s old``."""
    backend = group[0].position.backends[place]
    held = [one.held[backend.factory] for one in group]
    if backend.newest is None:
        return f"{backend.factory} has nothing"
    where = "current" if not backend.behind else f"{backend.behind} checkpoints behind"
    about = "about " if backend.factory == "kafka-changelog" else ""
    sizes = [one.size for one in held]
    total = "" if None in sizes else f", {about}{size(sum(filter(None, sizes)))}"
    age = max(now_ms - one.taken_ms for one in held if one.taken_ms is not None)
    problem = f", PROBLEM: {held[0].problem}" if held[0].problem else ""
    return f"{backend.factory} {where}{total}, {duration(age)} old{problem}"


def _offer(group: Sequence[StoreStatus], now_ms: int) -> list[str]:
    """For example ``an offer for blob-store waits, and expires in 22 h``."""
    expires = min((one.offer.expires_ms for one in group if one.offer is not None), default=None)
    return [] if expires is None else [f"an offer for {BLOB_STORE} waits, and expires in {duration(expires - now_ms)}"]


def _ages(record: CheckpointRecord, now_ms: int) -> int:
    return now_ms - (record.current.published_ms or record.current.checkpoint_id.millis)


def _ranges(numbers: Sequence[int]) -> list[str]:
    """``0-3, 7``: consecutive numbers together."""
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return found


def _json(config: JobConfig, one: StoreStatus, together: bool, now_ms: int) -> dict[str, Any]:
    from statemgr.kafka.transactions.publisher import job_transactional_id, task_transactional_id

    position = one.position
    current = position.record.current
    task = position.record.task
    return {
        "task": task,
        "store": position.store,
        "stage": _number(position.stage),
        "configured": _number(position.configured),
        "checkpoint_id": str(current.checkpoint_id),
        "missing": list(position.missing),
        "backends": {
            backend.factory: {
                "behind": backend.behind,
                "checkpoint_id": None if backend.newest is None else str(backend.newest.checkpoint_id),
                **_held_json(one.held[backend.factory], now_ms),
            }
            for backend in position.backends
        },
        "offer": None
        if one.offer is None
        else {"checkpoint_id": str(one.offer.checkpoint_id), "expires_ms": one.offer.expires_ms},
        "owner": {
            "transactional_id": job_transactional_id(config) if together else task_transactional_id(config, task),
            "epoch": current.epoch,
            "last_commit_ms": current.published_ms or current.checkpoint_id.millis,
        },
    }


def _held_json(held: Held, now_ms: int) -> dict[str, Any]:
    age_s = None if held.taken_ms is None else (now_ms - held.taken_ms) / 1000
    return {"bytes": held.size, "age_s": age_s, "problem": held.problem}


def _number(stage: Stage | None) -> int | None:
    return None if stage is None else stage.value
