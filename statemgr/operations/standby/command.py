"""``statemgr standby``: keeps a copy of the state of tasks on this machine up to date. Fences nobody."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from statemgr.terminal.options import Call, duration, job_options
from statemgr.terminal.output import print_json, say, show_error, size

if TYPE_CHECKING:
    from statemgr.operations.standby.process import Standby
    from statemgr.operations.standby.standby import Followed

#: Seconds until a look at whether a signal has come.
_LOOK_S = 0.1
#: Looks at whether what waits for a server ends after the first signal.
_LAST_LOOKS = 20


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

    A task that opens on this machine then fetches nothing. Runs until SIGTERM or SIGINT, and ends within a few seconds;
    a second signal ends it at once. With --json, prints one line for each checkpoint that was fetched, could not be, or
    is not there yet.
    """
    from statemgr.operations.standby.process import Standby

    report = _print_line if call.as_json else _print
    with call.progress() as progress:
        standby = Standby(call.config, call.tasks, progress)
        if once:
            with standby:
                _once(standby.once(), report)
            return
        if not call.as_json:
            say("following the job; press Ctrl-C to stop")
        ended = _follow(standby, report, interval)
    if not ended:
        os._exit(0)  # threads wait for a server, and the end of Python would wait for them: nothing has to be finished


def _follow(standby: Standby, report: Callable[[Followed], None], interval: float) -> bool:
    """Follow until a signal, then close the standby.

    It follows on another thread, because a client may wait long for a server, and Python handles a signal between two
    steps of its main thread. This one waits for short times only.
    Returns: whether it is closed. It is not if a server does not answer, or after a second signal.
    """
    from concurrent.futures import wait

    from statemgr.local.machine import Threads

    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        standby.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def follow() -> None:
        with standby:
            standby.run(report, interval)

    following = Threads().worker("standby", background=True).submit(follow)
    looks = 0
    while not following.done() and len(signals) < 2 and looks < _LAST_LOOKS:
        wait([following], _LOOK_S)
        looks += bool(signals)
    if following.done():
        following.result()
    return following.done()


def _once(turn: list[Followed], report: Callable[[Followed], None]) -> None:
    for followed in turn:
        report(followed)
    errors = [followed.error for followed in turn if followed.error is not None]
    if errors:
        raise SystemExit(errors[0].exit_status)
    if not turn:
        say("no checkpoints yet")


def _print_line(followed: Followed) -> None:
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
    print_json(line, indent=None)


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
