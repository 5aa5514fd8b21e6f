"""``many-tasks``: one process opens, feeds and stops up to 1,000 tasks."""

from __future__ import annotations

from collections.abc import Iterator

from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
from statemgr.local.machine import SystemClock
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.loop_operations import make_input, send_input
from statemgr_tools.bench.measure import interleaved
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone
from statemgr_tools.bench.session import Session

_TASKS = (1, 10, 100, 1000)
#: What is measured, how a line names it, and its limit in seconds.
_TIMES = (("first", "until the first message", 3), ("all", "until every task", 30), ("stop", "from SIGTERM on", 5))


@case("many-tasks")
def many_tasks(session: Session) -> Iterator[Line]:
    """Restarts of a job whose tasks are all in one process, which is stopped when each has changes to commit."""
    for tasks in sorted({session.count(tasks, least=5) for tasks in _TASKS}):
        config = session.job("many", job__tasks=tasks, task__backup__factories="kafka-changelog")
        topic = f"{config.job_name}-in"
        with TopicAdmin(config, SystemClock()) as admin:
            admin.create_missing([checkpoint_topic_spec(config), *changelog_topic_specs(config)])
        make_input(config, topic)

        def restart(number: int, config=config, topic=topic) -> dict[str, float]:  # type: ignore[no-untyped-def]
            send_input(config, topic)
            operation = "statemgr_tools.bench.loop_operations:run_tasks"
            return in_fresh_process(operation, config=config.to_mapping(), topic=topic)

        restart(0)  # the first start makes the state
        found = interleaved({f"{tasks:,} tasks": restart}, session.rounds, session.report)[f"{tasks:,} tasks"]
        for name, what, limit in _TIMES:
            target = Target("at most", limit, of="value")
            yield alone("many-tasks", found.median(name), f"s {what}, {tasks:,} tasks", "a restart", target)
    given_up = Target("at most", 0, of="value")
    yield alone("many-tasks", found.largest("given_up"), f"last commits given up, {tasks:,} tasks", "", given_up)
    for name, limit in (("threads", 5), ("descriptors", 16)):
        each = found.median(name) / tasks
        yield alone("many-tasks", each, f"{name} per task, {tasks:,} tasks", "", Target("at most", limit, of="value"))
    megabytes = (found.median("bytes") - found.median("before")) / tasks / 1e6
    yield alone("many-tasks", megabytes, f"MB resident per task, {tasks:,} tasks", "")
