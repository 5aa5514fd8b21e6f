"""The output of ``statemgr plan-capacity``: the results of the formulas by topic, for JSON and as text. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from statemgr_tools.sizing.prices import Prices
from statemgr_tools.sizing.resources import Resources
from statemgr_tools.sizing.simulation import Outcome, Services, simulate
from statemgr_tools.sizing.workload import Workload

#: Above this, queues in front of a stage grow quickly.
_BUSY = 0.7
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
#: Topic → name → value.
Results = Mapping[str, Mapping[str, float]]


def results(workload: Workload, prices: Prices) -> Results:
    """Return all results.

    A name ends with its unit: ``_per_s``, ``_bytes``, ``_s``. Other names are counts, and cost is in the currency of
    the prices.
    """
    found = Resources(workload)
    commits = found.commits
    restores = workload.blobs or workload.changelog
    costs = found.monthly_cost(prices)
    return {
        "job": {
            "state_bytes": commits.state_bytes,
            "state_of_task_bytes": commits.state_bytes / workload.tasks,
            "tasks_per_process": found.tasks_per_process,
            "commits_per_s": commits.commits_per_s,
            "changes_per_commit": commits.changes * workload.stores,
            "commit_s": found.commit_s,
        },
        "blob store": {
            "put_per_s": commits.puts_per_s,
            "untag_per_s": commits.untags_per_s,
            "delete_per_s": commits.deletes_per_s,
            "list_per_s": found.lists_per_s,
            "check_per_s": found.checks_per_s,
            "restore_of_task_gets": found.restore_gets if workload.blobs else 0.0,
            "segment_bytes": commits.segment_bytes if workload.blobs and not commits.every_commit else 0.0,
            "snapshot_bytes": commits.snapshot_bytes if workload.blobs else 0.0,
            "commits_between_snapshots": float(commits.commits_between) if workload.blobs else 0.0,
            "uploaded_per_s_bytes": commits.uploaded_per_s,
            "stored_bytes": commits.stored_bytes,
        },
        "checkpoint topic": {
            "record_bytes": found.checkpoint_record_bytes,
            "written_per_s_bytes": found.topic_written_per_s,
            "topic_bytes": found.topic_bytes,
            "read_s": found.topic_read_s,
        },
        "changelogs": {
            "written_per_s_bytes": found.changelog_written_per_s,
            "records": found.changelog_records,
            "topic_bytes": found.changelog_bytes,
        },
        "restore": {
            "task_bytes": found.restore_bytes if workload.blobs else found.changelog_bytes / workload.tasks,
            "task_s": found.restore_task_s,
            "machine_s": found.restore_machine_s,
            "machine_spread_s": found.restore_spread_s,
            "everything_s": found.restore_all_s,
        }
        if restores
        else {},
        "each process": {
            "disk_bytes": found.disk_per_process,
            "memory_bytes": found.memory_per_process,
            "sent_per_s_bytes": found.network_per_process,
        },
        "brokers": {"disk_bytes": found.kafka_bytes},
        "cost of a month": {**costs, "total": math.fsum(costs.values())},
    }


_TEXTS = {
    "state_bytes": "state",
    "state_of_task_bytes": "state of a task",
    "tasks_per_process": "tasks of a process",
    "commits_per_s": "commits, each a Kafka transaction",
    "changes_per_commit": "changes in a commit of a task",
    "commit_s": "time of a commit",
    "put_per_s": "PUT requests",
    "untag_per_s": "requests that remove a TTL",
    "delete_per_s": "DELETE requests",
    "list_per_s": "LIST requests",
    "check_per_s": "GET requests that check blobs",
    "restore_of_task_gets": "GET requests of the restore of a task",
    "segment_bytes": "segment of a store in a commit",
    "snapshot_bytes": "new files of a snapshot of a store",
    "commits_between_snapshots": "commits from one snapshot to the next",
    "uploaded_per_s_bytes": "uploaded",
    "stored_bytes": "stored",
    "record_bytes": "record of a task",
    "written_per_s_bytes": "written, on each replica",
    "topic_bytes": "size, on each replica",
    "read_s": "reading it, when a process starts",
    "records": "records",
    "task_bytes": "fetched for a task",
    "task_s": "a task alone, after its machine is lost",
    "machine_s": "all tasks of a lost machine, on one new machine",
    "machine_spread_s": "all tasks of a lost machine, spread over the others",
    "everything_s": "every task, all machines lost",
    "disk_bytes": "disk",
    "memory_bytes": "memory",
    "sent_per_s_bytes": "sent to the blob store and Kafka",
}


def rows(found: Results, currency: str) -> list[tuple[str, str, str]]:
    """Return topic, quantity and value as text. A topic is only in its first row; missing parts are left out."""
    made: list[tuple[str, str, str]] = []
    for topic, values in found.items():
        shown = [(name, value) for name, value in values.items() if value]
        cost = topic.startswith("cost")
        for number, (name, value) in enumerate(shown):
            text = f"{value:,.2f} {currency}" if cost else in_words(name, value)
            made.append((topic if number == 0 else "", _TEXTS.get(name, name), text))
    return made


def simulated(workload: Workload, services: Services) -> dict[str, Outcome]:
    """Return the simulated commits of processes that began at different times, and of processes that began together."""
    plan = Resources(workload)
    return {
        "processes that commit at different times": simulate(plan, services, together=False),
        "all processes at the same time": simulate(plan, services, together=True),
    }


def stage_rows(outcome: Outcome, workload: Workload) -> list[tuple[str, str, str, str, str]]:
    """Return the simulated stages, and how many such tasks each one can handle. A stage above 100% falls behind."""
    found = []
    for stage in outcome.stages:
        shared = not stage.name.endswith("of a process")
        most = f"{round(workload.tasks * _BUSY / stage.busy):,}" if shared and stage.busy else ""
        falls_behind = " (falls behind)" if stage.busy > 1 else ""
        waits = duration(stage.waited_p50_s), duration(stage.waited_p99_s)
        found.append((stage.name, f"{stage.busy:.1%}{falls_behind}", *waits, most))
    return found


def in_words(name: str, value: float) -> str:
    """Return a value with its unit, which the ending of the name determines."""
    rate = "_per_s" in name
    if name.endswith("_bytes"):
        return size(value) + ("/s" if rate else "")
    if rate:
        return f"{value:,.3g}/s" if value < 1000 else f"{value:,.0f}/s"
    if name.endswith("_s"):
        return duration(value)
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def size(value: float) -> str:
    """Return bytes with a decimal unit and three digits."""
    power = 0
    while value >= 999.5 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}" if value < 1000 else f"{value:,.0f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that people use for such a time."""
    for limit, unit in ((86_400 * 2, 86_400), (7200, 3600), (120, 60)):
        if seconds >= limit:
            return f"{seconds / unit:.3g} {'days' if unit == 86_400 else 'h' if unit == 3600 else 'min'}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
