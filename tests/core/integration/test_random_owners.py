"""Random histories of owners in separate processes, on a broker that soon forgets them.

Each history has a seed. ``STATEMGR_TEST_HISTORIES`` is the number of histories (4), and ``STATEMGR_TEST_SEED`` is the
first seed (0). All histories but the first are long tests.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from statemgr import JobConfig, StateManager
from statemgr.ids import task_name
from statemgr.phases import Phase
from statemgr.reader import JobReader
from tests.commits import totals
from tests.jobs import DUAL, with_changes
from tests.kafka_jobs import committed, state_of
from tests.owners import job
from tests.servers import KafkaServer

HISTORIES = int(os.environ.get("STATEMGR_TEST_HISTORIES", "4"))
SEED = int(os.environ.get("STATEMGR_TEST_SEED", "0"))
#: Errors that an owner may get: it is no longer the owner, or it may try again.
EXPECTED = {"FencedError", "RetryableError", "OutcomeUnknownError"}
OPENING = [phase for phase in Phase if phase.startswith("restore")]
COMMIT = [phase for phase in Phase if phase.startswith(("commit", "publish", "clean-up"))]
ROOT = Path(__file__).parents[3]
Content = dict[str, str]


class Process:
    """An owner, and a model of what it holds. ``order`` is the order that it has not answered yet."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.random_owner", json.dumps(config_of(self._config))]
        self.child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.order: dict[str, Any] | None = None
        #: Task → content of its open store; for an owner of all tasks, content of a checkpoint.
        self.tasks: dict[str, Content] = {}
        self.is_whole = False

    def send(self, order: dict[str, Any]) -> None:
        """Send an order."""
        assert self.child.stdin is not None
        self.order = order
        with suppress(BrokenPipeError):  # the answer reports it
            self.child.stdin.write(json.dumps(order) + "\n")
            self.child.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the outcome of the last order, or None while there is none. Start an owner that has died again."""
        assert self.child.stdout is not None
        if not select.select([self.child.stdout], [], [], seconds)[0]:
            return None
        line = self.child.stdout.readline()
        if line:
            self.order = None
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.end()
        assert self.child.returncode == -signal.SIGKILL
        self._start()
        return {"error": sorted(EXPECTED), "message": "died"}

    @property
    def is_suspended(self) -> bool:
        """Whether the process has stopped itself."""
        return psutil.Process(self.child.pid).status() == psutil.STATUS_STOPPED

    def end(self) -> None:
        """Kill the process."""
        self.child.kill()
        self.child.communicate()


def config_of(config: JobConfig) -> dict[str, Any]:
    """Return the configuration in the form that a process gets."""
    return dict(config.to_mapping())


class History:
    """The actions of owners, by a random plan. Every commit writes a key of its own, so that a lost commit is seen.

    ``attempts``: task → number of a commit → the content that it would publish. ``acknowledged``: task → numbers of the
    acknowledged commits.
    """

    def __init__(self, config: JobConfig, directory: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._config = config
        self._tasks = [task_name(index) for index in range(config.tasks)]
        self._number = 0
        self.attempts: dict[str, dict[int, Content]] = {task: {0: {}} for task in self._tasks}
        self.acknowledged: dict[str, list[int]] = {task: [] for task in self._tasks}
        places = (directory / name for name in ("one", "two"))
        self.processes = [Process(with_changes(config, state__dir=str(place))) for place in places]

    def run(self, steps: int) -> None:
        """Send orders, wait and wake processes up at random. At the end, wait for the orders in progress."""
        chance = self._random
        process = self.processes[0]
        for _ in range(steps):
            before, process = process, process if chance.random() < 0.6 else chance.choice(self.processes)
            if process is not before and process.tasks and chance.random() < 0.3:
                time.sleep(3.5)  # the broker forgets owners that do nothing
            if process.order is None:
                process.send(self._next(process))
            elif process.is_suspended and chance.random() < 0.5:
                process.child.send_signal(signal.SIGCONT)
            self._take(process, chance.choice((0.0, 0.3, 1.0)))
        for process in self.processes:
            deadline = time.monotonic() + 600
            while process.order is not None:
                assert time.monotonic() < deadline, f"it hangs: {process.order}"
                process.child.send_signal(signal.SIGCONT)
                self._take(process, 0.1)

    def _next(self, process: Process) -> dict[str, Any]:
        chance, task = self._random, self._random.choice(self._tasks)
        if process.is_whole and chance.random() < 0.8:
            items = {task: self._write(task, process.tasks[task].copy()) for task in self._tasks}
            numbers = {task: max(self.attempts[task]) for task in self._tasks}
            return {"do": "publish", "numbers": numbers, "items": items, "plan": self._plan(COMMIT)}
        if not process.is_whole and task in process.tasks:
            if chance.random() < 0.15:
                return {"do": "close", "task": task, "plan": {}}
            items = self._write(task, process.tasks[task])
            return {"do": "commit", "task": task, "number": self._number, "items": items, "plan": self._plan(COMMIT)}
        if process.is_whole or (not process.tasks and chance.random() < 0.4):
            return {"do": "acquire", "plan": self._plan(OPENING)}
        return {"do": "open", "task": task, "plan": self._plan(OPENING)}

    def _write(self, task: str, content: Content) -> Any:
        """Return the changes for one more commit, and apply them to ``content``."""
        self._number += 1
        items: list[tuple[str, str | None]] = [(f"commit-{self._number}", "")]
        for _ in range(self._random.choice((0, 3, 20))):
            value = None if self._random.random() < 0.3 else f"{self._number}" * self._random.choice((1, 200))
            items.append((f"key-{self._random.randrange(30)}", value))
        for key, value in items:
            content.pop(key, None)
            if value is not None:
                content[key] = value
        self.attempts[task][self._number] = content.copy()
        return items

    def _plan(self, phases: list[Phase]) -> dict[str, Any]:
        roll = self._random.random()
        for what, below in (("die", 0.1), ("stop", 0.25), ("fail", 0.3)):
            if roll < below:
                return {what: self._random.choice(phases)}
        if roll < 0.5:
            return {"lost": self._random.choice(("early", "late")), "unsettled": self._random.choice((0, 1, 3))}
        return {}

    def _take(self, process: Process, seconds: float) -> None:
        order = process.order
        answer = process.answer(seconds)
        if order is None or answer is None:
            return
        task = order.get("task", "")
        if "error" in answer:
            assert EXPECTED & set(answer["error"]), (order, answer)
            if order["do"] in ("acquire", "publish"):
                process.tasks, process.is_whole = {}, False
            elif order["do"] == "commit" and "FencedError" in answer["error"] and answer["message"] != "died":
                process.send({"do": "close", "task": task, "plan": {}})
        elif order["do"] == "open":
            self.check(task, answer["base"], answer["content"])
            process.tasks[task] = answer["content"]
        elif order["do"] == "acquire":
            process.tasks = {of: self.attempts[of][base].copy() for of, base in answer["bases"].items()}
            process.is_whole = True
        elif order["do"] == "close":
            del process.tasks[task]
        else:
            for of, number in (order.get("numbers") or {task: order["number"]}).items():
                self.acknowledged[of].append(number)
                process.tasks[of] = self.attempts[of][number].copy()

    def check(self, task: str, number: int, content: Content) -> None:
        """Check that a state that was opened is that of a commit."""
        assert content == self.attempts[task][number]

    def check_all(self, config: JobConfig) -> None:
        """Check that the job continues, that no acknowledged commit is lost, that each publish continues the one
        before, and that the backends agree."""
        with StateManager(config) as manager:
            manager.fence_tasks(self._tasks)
            for task in self._tasks:
                opened = manager.open_task(task)
                last = opened.last_checkpoint
                content = {key.decode(): value.decode() for key, value in opened.store("totals").range()}
                self.check(task, last.input_offsets["orders-0"] if last else 0, content)
                opened.commit({"orders-0": last.input_offsets["orders-0"] if last else 0})
        with JobReader(config) as reader:
            records = list(reader.history())
        changelog = config.stores["totals"].changelog_topic
        for index, task in enumerate(self._tasks):
            checkpoints = [record.current for record in records if record.task == task]
            published = [checkpoint.input_offsets["orders-0"] for checkpoint in checkpoints]
            assert set(self.acknowledged[task]) <= set(published)
            assert [c.sequence for c in checkpoints] == sorted({c.sequence for c in checkpoints})
            for at, number in enumerate(published):
                before = {f"commit-{earlier}" for earlier in published[:at] if earlier}
                assert before <= self.attempts[task][number].keys(), f"{number} continues something else: {published}"
            expected = {k.encode(): v.encode() for k, v in self.attempts[task][published[-1]].items()}
            assert state_of(committed(config, changelog, index)) == expected
            for factory in DUAL:
                assert totals(config, factory)[task] == expected


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """End the processes that a failed history leaves behind."""
    with ExitStack() as ending:
        yield ending


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
def test_owners_that_come_go_die_and_wake_up(
    forgetful: KafkaServer, tmp_path: Path, running: ExitStack, seed: int
) -> None:
    """FAULTS 4, 5, 23 and 39, invariants 4, 7 and 11: two owners of two tasks, or of the complete job, act in turn and
    at the same time."""
    config = job(forgetful, tmp_path, tasks=2, task__commit__timeout__ms=5000)
    history = History(config, tmp_path, seed)
    for process in history.processes:
        running.callback(lambda process=process: process.end())
    history.run(40)
    for process in history.processes:
        process.end()
    history.check_all(with_changes(config, state__dir=str(tmp_path / "end"), task__commit__timeout__ms=30_000))
