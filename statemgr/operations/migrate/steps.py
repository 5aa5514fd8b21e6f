"""``statemgr migrate plan``, ``advance`` and ``rollback``: one stage further, or one back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.errors import ConfigError, UnavailableError
from statemgr.logs import counted
from statemgr.model.jobs.stages import published_together
from statemgr.terminal.options import Call, duration, job_options
from statemgr.terminal.output import console, messages, print_json, size

if TYPE_CHECKING:
    from statemgr.model.checkpoint import CheckpointRecord
    from statemgr.model.jobs.stages import Step, StorePosition
    from statemgr.operations.migrate.preconditions import FirstCommits, Precondition
    from statemgr.terminal.toml_edit import TomlEdit

_POLL_S = 1.0
_stores_option = click.option(
    "--store", "stores", multiple=True, help="Move only this store. Repeatable; default: all stores."
)
_trials_option = click.option(
    "--trials",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Restore N tasks on trial, the largest ones first.",
)
_write_option = click.option("--write", is_flag=True, help="Change the configuration file; keep a copy of the old one.")
_wait_option = click.option("--wait", is_flag=True, help="Wait until every task has committed in the new stage.")
_timeout_option = click.option(
    "--timeout",
    default="1 h",
    show_default=True,
    callback=duration(),
    metavar="TIME",
    help="Give up waiting after this time.",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A step, what it changes in the configuration, and what must hold before it."""

    step: Step
    edit: TomlEdit | None
    preconditions: Sequence[Precondition]
    first: FirstCommits | None
    records: Sequence[CheckpointRecord]

    @property
    def ready(self) -> bool:
        """Whether all preconditions are met."""
        return all(one.met for one in self.preconditions)


@click.command("plan", short_help="Show the next stage and its preconditions.")
@job_options()
@_stores_option
@_trials_option
def plan_command(call: Call, stores: tuple[str, ...], trials: int) -> None:
    """Show the next stage, and what it needs; exit status 1 if something is missing. Nothing is changed."""
    _take(call, stores, trials, forward=True, write=False, wait=False, timeout=0)


@click.command("advance", short_help="Move the configuration to the next stage.")
@job_options()
@_stores_option
@_trials_option
@_write_option
@_wait_option
@_timeout_option
def advance_command(call: Call, stores: tuple[str, ...], trials: int, write: bool, wait: bool, timeout: float) -> None:
    """Move the configuration to the next stage, if all that it needs is there. Restart the job afterwards."""
    _take(call, stores, trials, forward=True, write=write, wait=wait, timeout=timeout)


@click.command("rollback")
@job_options()
@_stores_option
@_trials_option
@_write_option
@_wait_option
@_timeout_option
def rollback_command(call: Call, stores: tuple[str, ...], trials: int, write: bool, wait: bool, timeout: float) -> None:
    """Move the configuration to the stage before. Restart the job afterwards.

    From stage 4, stop the job first: with --write its changelogs are rebuilt, and whoever still runs it is fenced.
    """
    _take(call, stores, trials, forward=False, write=write, wait=wait, timeout=timeout)


def _take(
    call: Call,
    stores: Sequence[str],
    trials: int,
    *,
    forward: bool,
    write: bool,
    wait: bool,
    timeout: float,
) -> None:
    for store in stores:
        call.config.store(store)
    if wait and not write:
        found = _wait(call, call.config, stores, timeout)
        if call.as_json:
            print_json([{"task": one.record.task, "store": one.store, "stage": int(one.stage or 0)} for one in found])
        return
    plan = _plan(call, stores, trials, forward=forward)
    saved: Path | None = None
    if plan is not None and write and plan.ready and plan.edit is not None:
        saved = _write(plan, call, stores)
    if call.as_json:
        print_json(_json(plan, saved))
    elif plan is None:
        console().print(f"nothing to do: the job is in the {'last' if forward else 'first'} stage")
    else:
        _print(plan, saved, write)
    if plan is None:
        return
    if not plan.ready:
        raise SystemExit(1)
    if wait:
        changes = {} if plan.edit is None else _changes(plan.edit)
        _wait(call, JobConfig.from_mapping(call.config.to_mapping(), changes), stores, timeout)


def _plan(call: Call, stores: Sequence[str], trials: int, *, forward: bool) -> Plan | None:
    """The plan of a step; None if there is no further stage. Raises: MissingState without a checkpoint; ConfigError."""
    from statemgr.health.stages import positions
    from statemgr.model.jobs.stages import step_back, step_forward
    from statemgr.operations.migrate.preconditions import check
    from statemgr.reader import JobReader
    from statemgr.wiring import open_services

    config = call.config
    services = open_services(config)
    try:
        with JobReader(config, only_settled=True) as reader, call.progress() as progress:
            records = reader.retaining()
            found = positions(services, records, stores)
            known = [position for position in found if position.stage is not None and position.configured is not None]
            if not known:
                raise _in_no_stage()
            step = step_forward(known) if forward else step_back(known)
            if step is None:
                if forward:
                    _refuse_lower(known)
                return None
            edit, refused = _edit(config, step, stores)
            conditions, first = check(services, reader, step, found, records, trials, progress)
            if refused is not None:
                conditions = [refused, *conditions]
            return Plan(step=step, edit=edit, preconditions=conditions, first=first, records=records)
    finally:
        services.close()


def _in_no_stage() -> ConfigError:
    return ConfigError(
        "no store is in a stage of a migration: all use other backends",
        hint="use `statemgr migrate status` to see them",
    )


def _refuse_lower(known: Sequence[StorePosition]) -> None:
    """Raises: ConfigError if the configuration was changed to a stage before the last one."""
    from statemgr.model.jobs.stages import Stage

    asked = min((one.configured for one in known if one.configured is not None), default=Stage.BLOBS)
    if asked is not Stage.BLOBS:
        raise ConfigError(
            f"all stores are in the last stage, but the configuration asks for stage {asked.value}",
            hint="use `statemgr migrate rollback` to see what that needs",
        )


def _edit(config: JobConfig, step: Step, stores: Sequence[str]) -> tuple[TomlEdit | None, Precondition | None]:
    """The change of the configuration file; or what the configuration lacks for it."""
    from statemgr.model.jobs.stages import changed_keys
    from statemgr.operations.migrate.preconditions import Precondition
    from statemgr.terminal.toml_edit import TomlEdit

    if step.written:
        return None, None
    own = {
        name: any(f"stores.{name}.{kind}.factories" in config.values for kind in ("backup", "restore"))
        for name, store in config.stores.items()
        if store.durable
    }
    path = Path(click.get_current_context().params["config_file"])
    try:
        return TomlEdit(path, changed_keys(step, own, stores)), None
    except ConfigError as error:
        return None, Precondition("configuration", False, error.message, error.hint)


def _write(plan: Plan, call: Call, stores: Sequence[str]) -> Path:
    """Rebuild the changelogs where they are needed, or look at the topic again, then change the file.

    Returns: where the old file is now.
    """
    from statemgr.model.jobs.stages import Stage
    from statemgr.operations.migrate.preconditions import check_again
    from statemgr.operations.migrate.rebuild import rebuild

    assert plan.edit is not None
    if plan.step.stage is Stage.BLOBS:
        # the file is changed last: until then a repeated rollback begins here again
        later = JobConfig.from_mapping(call.config.to_mapping(), _changes(plan.edit))
        with call.progress() as progress:
            rebuild(later, plan.records, published_together(plan.records), progress)
    else:
        check_again(call.config, plan.step, stores)
    return plan.edit.write(f"stage-{plan.step.stage}")


def _changes(edit: TomlEdit) -> dict[str, object]:
    return {key: value if isinstance(value, str | int) else list(value) for key, value in edit.changes.items()}


def _wait(call: Call, config: JobConfig, stores: Sequence[str], timeout: float) -> list[StorePosition]:
    """Until every store has committed with the factories of the configuration. Raises: ConfigError without any;
    UnavailableError."""
    from statemgr.health.stages import positions
    from statemgr.reader import JobReader
    from statemgr.wiring import open_services

    services = open_services(config)
    try:
        with JobReader(config, only_settled=True) as reader, call.progress() as progress:
            deadline = services.clock.monotonic() + timeout
            while True:
                found = [one for one in positions(services, reader.retaining(), stores) if one.configured is not None]
                if not found:
                    raise _in_no_stage()
                late = [one for one in found if one.stage != one.configured or one.missing]
                targets = " and ".join(sorted({str(one.configured) for one in found}))
                progress(f"stores in stage {targets}", len(found) - len(late), len(found))
                if not late:
                    break
                if services.clock.monotonic() > deadline:
                    raise UnavailableError(
                        f"{len(late)} of {counted(len(found), 'store')} have not committed in stage {targets}",
                        hint="restart the job with the new configuration; `statemgr migrate status` shows what is "
                        "late. A query on Spark, or a loop of your own, may commit only when there is new input",
                    )
                services.clock.sleep(_POLL_S)
    finally:
        services.close()
    if not call.as_json:
        console().print(f"all {len(found)} stores have committed in stage {targets}", markup=False)
    return found


# --- output -----------------------------------------------------------------------------------------------


def _print(plan: Plan, saved: Path | None, write: bool) -> None:
    out, step = console(), plan.step
    out.print(f"stage {step.stage.title} → {step.target.title}\n", markup=False, soft_wrap=True)
    if plan.edit is not None:
        out.print(plan.edit.diff(), markup=False, soft_wrap=True)
    for one in plan.preconditions:
        out.print("met      " if one.met else "NOT MET  ", style="green" if one.met else "bold red", end="")
        out.print(f"{one.name}: {one.detail}", markup=False, soft_wrap=True)
        if one.fix and not one.met:
            out.print(f"         → {one.fix}", markup=False, soft_wrap=True)
    if plan.first is not None:
        _print_first(plan.first, to_blobs=step.target > step.stage)
    if saved is not None:
        out.print(f"written; the old file is {saved}. Restart the job.", markup=False, soft_wrap=True)
    elif step.written and plan.ready:
        out.print("the configuration asks for it already: restart the job", markup=False)
    elif step.written:
        out.print("the configuration asks for it already: see what is not met before you restart the job", markup=False)
    elif not plan.ready:
        messages().print("nothing was changed: see what is not met")
    elif not write:
        messages().print("--write changes the configuration file", markup=False)


def _print_first(first: FirstCommits, *, to_blobs: bool) -> None:
    out = console()
    if first.offered:
        out.print(f"stores that begin with an offered snapshot: {first.offered}", markup=False)
    about = "up to about" if to_blobs else "about"  # a changelog also has records that newer ones replace
    time = "" if first.seconds is None else f", in {about} {first.seconds:,.0f} s"
    out.print(f"the first commits write {about} {size(first.size)}{time}", markup=False)
    if to_blobs and first.size:
        out.print(
            "`statemgr materialize` uploads it before the restart, while the job runs", markup=False, soft_wrap=True
        )


def _json(plan: Plan | None, saved: Path | None) -> dict[str, Any]:
    if plan is None:
        return {"stage": None, "next": None, "ready": False}
    return {
        "stage": plan.step.stage.value,
        "next": plan.step.target.value,
        "written": plan.step.written or saved is not None,
        "saved_as": None if saved is None else str(saved),
        "diff": "" if plan.edit is None else plan.edit.diff(),
        "preconditions": [asdict(one) for one in plan.preconditions],
        "ready": plan.ready,
        "bytes": None if plan.first is None else plan.first.size,
        "seconds": None if plan.first is None else plan.first.seconds,
        "offered": 0 if plan.first is None else plan.first.offered,
    }
