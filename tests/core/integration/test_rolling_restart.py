"""A rolling restart with names for the members (static membership): nobody but the restarted process notices it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr import JobConfig
from tests.jobs import contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.loop_members import Process, make_topic, produce, published
from tests.servers import KafkaServer

#: Static members of a group that would notice a death after 20 seconds, which is longer than a restart.
_CLASSIC = {"session__timeout__ms": 20_000, "heartbeat__interval__ms": 300}
_GROUPS = {
    "range": _CLASSIC,
    "cooperative-sticky": _CLASSIC | {"partition__assignment__strategy": "cooperative-sticky"},
}
#: The loop says so when a task is ready (docs/monitoring.md); a member that keeps its tasks says it once for each.
_OPENED = re.compile(r"loop_log:(Partition \d+): open")


@pytest.fixture
def processes() -> Iterator[dict[str, Process]]:
    """Kill the members that a failed test leaves behind."""
    running: dict[str, Process] = {}
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("strategy", _GROUPS)
def test_members_with_names_are_restarted_in_turn(
    kafka: KafkaServer, tmp_path: Path, processes: dict[str, Process], strategy: str
) -> None:
    """J2.25: each of three members is stopped and started again while input arrives. It gets its own tasks back, nobody
    else opens a task again, each message counts once, and no restart writes a warning."""
    topic, group, tasks, names = kafka.fresh_name("in"), kafka.fresh_name("group"), 6, ("pod-0", "pod-1", "pod-2")
    make_topic(kafka, topic, tasks)
    settings = {f"kafka__consumer__{key}": value for key, value in _GROUPS[strategy].items()}
    mapping = job_mapping(kafka, tmp_path, tasks=tasks, task__commit__ms=200, **settings)
    config, sent = JobConfig.from_mapping(mapping), 0

    def start(name: str) -> None:
        own = with_changes(elsewhere(config, tmp_path / name, "blob-store"), kafka__consumer__group__instance__id=name)
        processes[name] = Process.start(own, group, topic, tmp_path / f"{name}.log")

    def opened(name: str) -> Counter[str]:
        return Counter(_OPENED.findall((tmp_path / f"{name}.err").read_text(encoding="utf-8")))

    def send() -> None:
        nonlocal sent
        produce(kafka, topic, tasks, range(sent, sent + 100))
        sent += 100

    def owners() -> dict[str, set[str]]:
        """Who has processed messages of which partition since the last call."""
        found = {}
        for name, process in processes.items():
            lines = process.processed()
            found[name] = {line.split()[1] for line in lines[seen.get(name, 0) :]}
            seen[name] = len(lines)
        return found

    seen: dict[str, int] = {}
    for name in names:
        start(name)
    before: dict[str, set[str]] = {}
    while sorted(map(len, before.values())) != [2, 2, 2]:  # until all have joined, or the time of the test is over
        assert all(process.child.poll() is None for process in processes.values())
        send()
        wait_until(lambda: sum(published(config).values()) == sent)
        before = owners()
    openings = {name: opened(name) for name in names}
    joined = {name: (tmp_path / f"{name}.err").stat().st_size for name in names}
    for name in names:
        assert processes[name].terminate()[1] is None
        send()  # that of its partitions waits for it
        start(name)
        wait_until(lambda: sum(published(config).values()) == sent)
        assert owners() == before
        openings[name] += Counter({f"Partition {number}": 1 for number in before[name]})
        assert {one: opened(one) for one in names} == openings
    for process in processes.values():
        assert process.terminate()[1] is None
    states = [contents(config, f"Partition {index}")[0] for index in range(tasks)]
    assert sum(int(value) for state in states for value in state["totals"].values()) == sent
    logged = b"".join((tmp_path / f"{name}.err").read_bytes()[joined[name] :] for name in names).decode()
    assert [line for line in logged.splitlines() if not line.startswith("INFO:statemgr.")] == []
