"""``statemgr migrate verify``: proves that both backends hold the same state. Fences nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG, RAW_TOPIC
from statemgr.errors import CorruptError, MissingError, MissingState, UnavailableError
from statemgr.logs import counted
from statemgr.terminal.items import render, text
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import console, print_json, print_table

if TYPE_CHECKING:
    from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
    from statemgr.operations.migrate.verify import Difference, StoreToVerify, StoreVerified, Verifier
    from statemgr.reader import JobReader

#: How many times a newer checkpoint is tried because a running job has dropped the one that was read.
_TRIES = 5


@click.command("verify", short_help="Prove that all backends hold the same state.")
@job_options("tasks", "checkpoint")
@click.option("--store", "stores", multiple=True, help="Verify only this store. Repeatable; default: all stores.")
@click.option(
    "--against",
    type=click.Choice([RAW_TOPIC]),
    help="Compare with the changelog as a plain consumer reads it, up to the checkpoint, or to its end if the "
    "checkpoint has no changelog.",
)
@click.option(
    "--differences",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="List up to N keys that differ.",
)
def verify_command(call: Call, stores: tuple[str, ...], against: str | None, differences: int) -> None:
    """Prove that all backends hold the same state; exit status 1 if they do not. A running job is not disturbed."""
    from concurrent.futures.process import BrokenProcessPool

    from statemgr.local.machine import processors
    from statemgr.operations.migrate.verify import Verifier
    from statemgr.reader import JobReader
    from statemgr.wiring import WorkerProcesses, open_services

    config, count = call.config, processors()
    with (
        closing(open_services(config)) as services,
        JobReader(config, only_settled=True) as reader,  # do not wait for an open transaction
        WorkerProcesses(config, count) as workers,
        call.progress() as progress,
        services.executors.pool("stores", count) as pool,
    ):
        verifier = Verifier(services, workers.submit, progress, processes=count, differences=differences)
        records = reader.retaining(call.checkpoint_id, call.tasks)
        chosen = list(_to_verify(config, records, call.checkpoint_id, stores, against))
        missing = set(stores) - {one.store for one in chosen}
        if missing or not chosen:
            raise MissingState(
                "the checkpoints have no state of these stores",
                hint="let the job commit with them, and run this again",
                stores=", ".join(sorted(missing) or config.stores),
            )
        newest = call.checkpoint_id is None
        try:
            found = list(pool.map(lambda wanted: _verified(verifier, reader, wanted, newest), chosen))
        except BrokenProcessPool as error:
            hint = "a machine with more memory helps; so does --task, which verifies fewer tasks"
            raise UnavailableError("a process that took part was killed", hint=hint) from error
    _print_verified(found, call.as_json)
    if not all(one.equal for one in found):
        raise SystemExit(max((one.problem.exit_status for one in found if one.problem and one.failed), default=1))


def _to_verify(
    config: JobConfig,
    records: Sequence[CheckpointRecord],
    checkpoint_id: str | None,
    stores: Sequence[str],
    against: str | None,
) -> Iterator[StoreToVerify]:
    """The stores of the records' current checkpoints, or of a retained one, that the configuration has."""
    from statemgr.operations.migrate.verify import StoreToVerify

    for store in stores:
        config.store(store)
    for record in records:
        checkpoint = _find(record, checkpoint_id)
        for store in sorted(set(checkpoint.stores) & set(stores or config.stores)):
            factories = [name for name, has in checkpoint.state_checkpoint_markers.items() if store in has]
            if against is not None:
                others = [name for name in factories if name != KAFKA_CHANGELOG]
                factories = [against, *(others or factories)]
            if config.stores[store].backup_factories or factories:
                yield StoreToVerify(record, checkpoint, store, tuple(sorted(factories, reverse=True)))


def _find(record: CheckpointRecord, checkpoint_id: str | None) -> Checkpoint:
    if checkpoint_id is None:
        return record.current
    return next(one for one in record.checkpoints if str(one.checkpoint_id) == checkpoint_id)


def _verified(verifier: Verifier, reader: JobReader, wanted: StoreToVerify, newest: bool) -> StoreVerified:
    """Verify one store. Where a running job has dropped the checkpoint meanwhile, its newest one is taken instead."""
    from statemgr.operations.migrate.verify import StoreVerified

    task, found_id = wanted.record.task, str(wanted.checkpoint.checkpoint_id)
    if len(wanted.factories) < 2:
        has = wanted.factories[0] if wanted.factories else "no backend"
        problem = MissingState(f"only {has} has this state: there is nothing to compare it with")
        return StoreVerified(task, wanted.store, found_id, problem=problem)
    for _ in range(_TRIES):
        try:
            return verifier.verify(wanted)
        except (MissingError, CorruptError) as error:
            record = reader.records().get(task)
            if record is None:
                problem = MissingState("the task was removed meanwhile", hint="run the command again", task=task)
                return StoreVerified(task, wanted.store, found_id, problem=problem, failed=True)
            if not newest or record.current == wanted.checkpoint:
                return StoreVerified(task, wanted.store, found_id, problem=error, failed=True)
            wanted = replace(wanted, record=record, checkpoint=record.current)
    raise UnavailableError(
        "the job drops checkpoints faster than they can be read", hint="raise task.checkpoint.retained"
    )


def _print_verified(found: Sequence[StoreVerified], as_json: bool) -> None:
    if as_json:
        print_json({"equal": all(one.equal for one in found), "stores": [_verified_json(one) for one in found]})
        return
    rows = [
        (
            one.task,
            one.store,
            one.checkpoint_id,
            factory,
            content.keys,
            content.hash,
            "equal" if one.equal else "DIFFERS",
        )
        for one in found
        for factory, content in one.contents.items()
    ]
    print_table(
        ("task", "store", "checkpoint", "backend", "keys", "hash", "result"), rows, empty="nothing was compared"
    )
    out = console()
    for one in found:
        for difference in one.differences:
            out.print(f"{one.task} / {one.store}: {_difference(difference)}", markup=False, soft_wrap=True)
        if one.problem is not None:
            out.print(f"{one.task} / {one.store}: {one.problem}", markup=False, soft_wrap=True)
    unequal = sum(not one.equal for one in found)
    stores = counted(len(found), "store")
    verdict = f"{unequal} of {stores} not proved equal" if unequal else f"{stores} proved equal"
    out.print(verdict, style="bold red" if unequal else "green")


def _difference(difference: Difference) -> str:
    """For example ``key a: kafka-changelog has 3 bytes, blob-store has none``."""
    sides = ", ".join(
        f"{name} {'lacks it' if size is None else f'has {size} bytes'}" for name, size in difference.sizes.items()
    )
    return f"key {text(render(difference.key, 'bytes'))}: {sides}"


def _verified_json(one: StoreVerified) -> dict[str, Any]:
    return {
        "task": one.task,
        "store": one.store,
        "checkpoint_id": one.checkpoint_id,
        "equal": one.equal,
        "backends": {
            name: {"keys": content.keys, "hash": content.hash, "seconds": round(one.seconds[name], 3)}
            for name, content in one.contents.items()
        },
        "differences": [
            {"key": render(difference.key, "bytes"), "value_sizes": dict(difference.sizes)}
            for difference in one.differences
        ],
        "problem": None if one.problem is None else str(one.problem),
    }
