"""``statemgr standby``: keeps a copy of the state of tasks on this machine up to date. Fences nobody."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from statemgr.terminal.options import Call, duration, job_options
from statemgr.terminal.output import say, show_error, size

if TYPE_CHECKING:
    from statemgr.operations.standby.standby import Followed


@click.command("standby")
@job_options("tasks")
@click.option("--once", is_flag=True, help="Fetch the current state once, and exit.")
@click.option(
    "--interval",
    default="1 s",
    show_default=True,
    callback=duration(least=0.01, most=3600),
    metavar="TIME",
    help="Time between checks for new checkpoints.",
)
def command(call: Call, once: bool, interval: float) -> None:
    """Keep a copy of the state of tasks in state.dir, at most one checkpoint behind. The job is not disturbed.

    A task that opens on this machine then fetches nothing. Runs until SIGTERM or SIGINT. With --json, prints one line
    for each checkpoint that was fetched, could not be, or is not there yet.
    """
    from statemgr.operations.standby.process import Standby

    report = _print_json if call.as_json else _print
    with call.progress() as progress, Standby(call.config, call.tasks, progress) as standby:
        if once:
            _once(standby.once(), report)
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, standby.stop)
        if not call.as_json:
            say("following the job; press Ctrl-C to stop")
        standby.run(report, interval)


def _once(turn: list[Followed], report: Callable[[Followed], None]) -> None:
    for followed in turn:
        report(followed)
    errors = [followed.error for followed in turn if followed.error is not None]
    if errors:
        raise SystemExit(errors[0].exit_status)
    if not turn:
        say("no checkpoints yet")


def _print_json(followed: Followed) -> None:
    checkpoint, error = followed.checkpoint, followed.error
    line = {
        "task": followed.task,
        "checkpoint_id": str(checkpoint.checkpoint_id) if checkpoint else None,
        "sequence": checkpoint.sequence if checkpoint else None,
        "seconds": round(followed.seconds, 3),
        "stores": {
            store.store: {
                "from": store.factory,
                "bytes_fetched": store.bytes_fetched,
                "bytes_reused": store.bytes_reused,
                "records": store.records,
            }
            for store in followed.stores
        },
        "error": str(error) if error else None,
    }
    click.echo(json.dumps(line, ensure_ascii=False))


def _print(followed: Followed) -> None:
    if followed.waits:
        say(f"{followed.task}: the topic has no checkpoint of the task yet")
        return
    if followed.error is not None:
        show_error(f"{followed.task or 'checkpoint topic'}: {followed.error}", followed.error.hint)
        return
    assert followed.checkpoint is not None
    fetched = sum(store.bytes_fetched for store in followed.stores)
    reused = sum(store.bytes_reused for store in followed.stores)
    sources = ", ".join(sorted({store.factory for store in followed.stores})) or "no stores"
    click.echo(
        f"{followed.task}  {followed.checkpoint.checkpoint_id}  {size(fetched)} fetched, {size(reused)} reused, "
        f"{followed.seconds:.2f} s ({sources})"
    )
