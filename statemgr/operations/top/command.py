"""``statemgr top``: the tasks of a job by lag and age, refreshed in the terminal. Reads only; fences nobody."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from statemgr.terminal.options import Call, duration, job_options, metrics_option
from statemgr.terminal.output import console, describe, moment, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from statemgr.health.overview import JobOverview
    from statemgr.health.problems import Problem
    from statemgr.health.processes import Fill
    from statemgr.ports import Clock

#: Lines of the screen that are not rows of the table.
_FRAME = 7
#: Seconds until a look at whether Ctrl-C was pressed.
_LOOK_S = 0.1
#: Seconds for the reading that is running at Ctrl-C.
_LAST_S = 0.5
#: As ``statemgr.health.overview.ORDERS``, which this module loads only when it runs.
_ORDERS = ("lag", "age", "task")


@dataclass(frozen=True)
class Reading:
    """What is shown at one moment: the job, its faults, and what is still to come of open stores."""

    overview: JobOverview
    problems: Sequence[Problem]
    fills: Sequence[Fill]


@click.command("top", short_help="Show the tasks by lag and age, refreshed.")
@job_options("tasks")
@click.option(
    "--once", is_flag=True, help="Print all tasks once, and end. So do --json, and an output that is no terminal."
)
@click.option("--sort", "order", type=click.Choice(_ORDERS), default="lag", show_default=True, help="What comes first.")
@click.option(
    "--interval",
    callback=duration(least=0.5),
    default="2 s",
    show_default=True,
    metavar="TIME",
    help="Time between two readings.",
)
@metrics_option
def command(call: Call, once: bool, order: str, interval: float, metrics: tuple[str, ...]) -> None:
    """Show the tasks of the job by lag and age, refreshed. The job may be running.

    The lag is the number of messages in the input after the checkpoint, and the age is the time since the checkpoint
    was published. Above the tasks are the faults that were found; docs/runbook.md says what to do about each. Tasks
    with a problem come first. With --metrics, below them are the stores that work while the rest of them is fetched.
    """
    from contextlib import ExitStack, closing

    from statemgr.health.diagnosis import Diagnosis
    from statemgr.health.overview import JobMonitor
    from statemgr.health.problems import in_order
    from statemgr.health.processes import Processes

    with ExitStack() as clients:
        monitor = clients.enter_context(JobMonitor(call.config))
        diagnosis = clients.enter_context(closing(Diagnosis(monitor)))
        processes = Processes(metrics, call.config.job_name, monitor.services.clock)

        def read() -> Reading:
            found = monitor.overview(call.tasks)
            problems = in_order([*diagnosis.problems(found), *processes.problems()])
            return Reading(found, problems, processes.fills())

        if call.as_json or once or not console().is_terminal:
            found = read()
            if call.as_json:
                print_json(_as_json(found, order))
            else:
                console().print(_shown(found, order))
            return
        if not _refresh(read, monitor.services.clock, order, interval):
            clients.pop_all()  # a reading waits for a server: the end of the process ends it


def _refresh(read: Callable[[], Reading], clock: Clock, order: str, interval: float) -> bool:
    """Show readings until Ctrl-C. If one fails, the reading before it stays, with the error.

    Readings run on another thread, because the Kafka client loses an interrupt that arrives within its code. This one
    waits for short times only: Python handles a signal between two steps of its main thread, and a signal that another
    thread receives does not end a wait.
    Returns: whether no reading is left that uses the clients.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from statemgr.health.slow_reads import Patient

    out = Console(highlight=False)
    readings = Patient(read, clock, fresh_s=interval)
    shown: RenderableType = Text("reading the checkpoint topic …")
    ended = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: ended.set())
    try:
        with Live(shown, console=out, screen=True, auto_refresh=False) as live:
            newest: object = None
            while not ended.wait(_LOOK_S):
                answer = readings.ask(_LOOK_S)
                if newest is (answer.error or answer.value):
                    continue
                newest = answer.error or answer.value
                if answer.error is not None:
                    error = Text(f"error: {describe(answer.error)}", style="bold red")
                    live.update(Group(error, shown), refresh=True)
                elif answer.value is not None:
                    shown = _shown(answer.value, order, out.size.height - _FRAME)
                    live.update(shown, refresh=True)
        return readings.ends_within(_LAST_S)
    finally:
        signal.signal(signal.SIGINT, before)


def _shown(reading: Reading, order: str, most: int | None = None) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from statemgr.health.processes import FILL_HEADERS

    found, wrong, fills = reading.overview, reading.problems, reading.fills
    ordered = found.ordered(order)
    rows = ordered if most is None else ordered[: max(most - len(wrong) - (len(fills) and len(fills) + 2), 1)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("task", "lag", "age", "stage", "owner", "checkpoint", "problem"):
        table.add_column(header, justify="right" if header in ("lag", "age") else "left", overflow="fold")
    for task in rows:
        stages = dict.fromkeys(task.stages.values())
        cells = (
            task.task,
            "?" if task.lag is None else f"{task.lag:,}",
            seconds(task.age_s),
            "; ".join(stages),
            task.owner,
            task.checkpoint_id,
            "; ".join(task.problems),
        )
        table.add_row(*map(escape, cells), style="red" if task.problems else None)
    lines: list[RenderableType] = [Text(headline(found), style="bold")]
    lines += [Text(f"{one.fault.title.lower()}: {one.part}. {one.detail}", style="bold red") for one in wrong]
    lines += [Text(f"note: {note}", style="yellow") for note in found.notes]
    lines += [Text(), table]
    if len(rows) < len(ordered):
        lines.append(Text(f"… and {len(ordered) - len(rows)} more tasks (--once prints all)"))
    if fills:
        coming = Table(box=None, pad_edge=False, header_style="bold")
        for header in FILL_HEADERS:
            coming.add_column(header, justify="left" if header in ("task", "store") else "right", overflow="fold")
        for fill in fills:
            coming.add_row(*map(escape, fill.cells()))
        lines += [Text(), coming]
    return Group(*lines)


def headline(found: JobOverview) -> str:
    """One line about the whole job."""
    lag = "?" if found.lag is None else f"{found.lag:,}"
    oldest = "no checkpoint" if found.oldest_s is None else f"oldest checkpoint {seconds(found.oldest_s)}"
    waiting = [
        f"{count} {name} waiting" for name, count in (("permits", found.permits), ("offers", found.offers)) if count
    ]
    parts = (f"{len(found.tasks)} of {found.expected} tasks", f"lag {lag}", oldest, *waiting, moment(found.taken_ms))
    return f"{found.job}: " + " · ".join(parts)


def seconds(age_s: float) -> str:
    """An age, such as ``0.4 s`` or ``3 min``."""
    from statemgr.terminal.output import duration

    return f"{age_s:.1f} s" if age_s < 10 else duration(round(age_s * 1000))


def _as_json(reading: Reading, order: str) -> dict[str, Any]:
    found = reading.overview
    return {
        **asdict(found),
        "oldest_s": found.oldest_s,
        "problems": [{"fault": one.fault.value, "part": one.part, "detail": one.detail} for one in reading.problems],
        "tasks": [asdict(task) for task in found.ordered(order)],
        "fills": [asdict(fill) for fill in reading.fills],
    }
