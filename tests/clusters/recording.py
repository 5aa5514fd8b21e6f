"""Clients that write down what they do and see, for the checker of histories: a consumer loop, and a single task.

A client writes a line of JSON to its file *before* it does something, and another one when it knows the outcome, so a
client that is killed leaves an unknown outcome. All clients of a machine have one clock.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Message

from statemgr import JobConfig, StateManager, StatemgrError, Store, Task
from statemgr.errors import DiskFull, FencedError, RetryableError
from statemgr.phases import Phase, add_observer
from tests.clusters.checker import Commit, History, Read
from tests.commits import totals
from tests.jobs import elsewhere

#: The key with the name of the newest commit.
LAST = b"!last"
#: Outcomes of a commit that is surely not published.
_FAILED = (FencedError, RetryableError, DiskFull)


class Recorder:
    """Appends lines to a file, each with one write, so that no line is lost when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def write(self, kind: str, what: object) -> None:
        """Append a line."""
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps([kind, what]).encode() + b"\n")

    def commit(self, commit: Commit) -> None:
        """A commit begins."""
        self.write("commit", {**asdict(commit), "ended": None})

    def outcome(self, name: str, outcome: str) -> None:
        """The outcome of a commit is known from now on."""
        self.write("outcome", {"name": name, "outcome": outcome, "at": time.monotonic()})

    def read(self, task: str, content: Mapping[bytes, bytes], began: float) -> str | None:
        """A client has seen the whole content of a task. Returns: the name of the commit in it."""
        found = {key.decode(): value.decode() for key, value in content.items()}
        last = found.pop(LAST.decode(), None)
        self.write("read", asdict(Read(task=task, found=last, content=found, began=began, ended=time.monotonic())))
        return last


def recorded(paths: Iterable[Path], **more: Any) -> History:
    """Return the history of some files. ``more`` are attributes of it."""
    commits: dict[str, Commit] = {}
    reads, outcomes = [], []
    for path in paths:
        for line in path.read_bytes().splitlines():
            kind, what = json.loads(line)
            if kind == "commit":
                commit = Commit(**{**what, "ended": float("inf")})
                assert commit.name not in commits, commit.name
                commits[commit.name] = commit
            elif kind == "read":
                reads.append(Read(**what))
            else:
                outcomes.append(what)
    for what in outcomes:
        commits[what["name"]] = replace(commits[what["name"]], outcome=what["outcome"], ended=what["at"])
    return History(commits=list(commits.values()), reads=reads, **more)


class TaskClient:
    """Opens a task, and commits it again and again. After an error the next call opens it again.

    Each commit adds one to some counters, so that a lost one is seen.
    """

    def __init__(self, config: JobConfig, log: Path, task: str = "Partition 0", keys: int = 20) -> None:
        self._config, self._task, self._keys = config, task, keys
        self._recorder = Recorder(log)
        self._session, self._number = secrets.token_hex(3), 0
        self._manager: StateManager | None = None
        self.errors: list[StatemgrError] = []

    def commit(self) -> bool:
        """Commit once. Returns: whether it was acknowledged; otherwise its error is the last of ``errors``."""
        name = ""
        try:
            task = self._opened()
            store, number = task.store("totals"), self._number
            self._number += 1
            keys = [f"k{(number + 7 * step) % self._keys}" for step in range(3)]
            before = {key: text(store.get(key.encode())) for key in keys}
            after = {key: str(int(old or 0) + 1) for key, old in before.items()}
            commit = Commit(
                name=f"{self._session}-{number}",
                task=self._task,
                base=text(store.get(LAST)),
                reads=before,
                writes=after,
                began=time.monotonic(),
            )
            self._recorder.commit(commit)
            put(store, commit)
            offset = task.last_checkpoint.input_offsets["orders-0"] if task.last_checkpoint else 0
            name = commit.name
            task.commit({"orders-0": offset + 1})
        except StatemgrError as error:
            self.errors.append(error)
            if name:
                self._recorder.outcome(name, "fail" if isinstance(error, _FAILED) else "unknown")
            self.close()
            return False
        self._recorder.outcome(name, "ok")
        return True

    def close(self) -> None:
        """End without a commit. A disk may fail here, too: everything is closed nevertheless."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            try:
                manager.close()
            except StatemgrError as error:
                self.errors.insert(0, error)

    def _opened(self) -> Task:
        if self._manager is None:
            self._manager = manager = StateManager(self._config)
            began = time.monotonic()
            self._open = manager.open_task(self._task)
            self._recorder.read(self._task, dict(self._open.store("totals").range()), began)
        return self._open


def read_all(config: JobConfig, log: Path, factory: str) -> None:
    """Read what is published of all tasks from one backend, as a client of its own. Raises: as the reader does."""
    recorder, began = Recorder(log), time.monotonic()
    for task, content in totals(config, factory).items():
        recorder.read(task, content, began)


def read_in_the_end(config: JobConfig, directory: Path, log: Path, factories: Sequence[str]) -> None:
    """Open each task on a machine without local copies, from each backend alone, and close it again."""
    recorder = Recorder(log)
    for factory in factories:
        there = elsewhere(config, directory / f"end-{factory}", factory)
        with StateManager(there) as manager:
            for number in range(config.tasks):
                began = time.monotonic()
                with manager.open_task(f"Partition {number}") as task:
                    recorder.read(task.name, dict(task.store("totals").range()), began)


def text(value: bytes | None) -> str | None:
    """A value as text."""
    return None if value is None else value.decode()


def put(store: Store, commit: Commit) -> None:
    """Write what a commit writes, and its name."""
    for key, value in commit.writes.items():
        assert value is not None
        store.put(key.encode(), value.encode())
    store.put(LAST, commit.name.encode())


class Counting:
    """A consumer loop's functions. Each message is a step of its own: commits take several steps at once.

    The value of a message is its name. Each message adds one to the counter of its key, and sends an output.
    """

    def __init__(self, recorder: Recorder, output: str) -> None:
        self._recorder, self._output = recorder, output
        self._session, self._number = secrets.token_hex(4), 0
        self._began: dict[str, float] = {}
        self._left: dict[str, deque[tuple[int, str]]] = {}
        self._last: dict[str, str | None] = {}
        add_observer(self._phase)

    def _phase(self, phase: Phase, subject: str) -> None:
        if phase is Phase.FENCE:
            for task in subject.split(", "):
                self._began[task.partition("/")[0]] = time.monotonic()

    def opened(self, task: Task) -> None:
        """Record what the opening has found."""
        began = self._began.get(task.name, 0.0)
        self._last[task.name] = self._recorder.read(task.name, dict(task.store("totals").range()), began)
        self._left[task.name] = deque()

    def process(self, task: Task, message: Message) -> None:
        """Count the key of a message."""
        self._acknowledged(task, f"{message.topic()}-{message.partition()}")
        key, value, offset = message.key(), message.value(), message.offset()
        assert isinstance(key, bytes)
        assert isinstance(value, bytes)
        assert offset is not None
        store, self._number = task.store("totals"), self._number + 1
        old = text(store.get(key))
        new, name = str(int(old or 0) + 1), f"{self._session}-{self._number}"
        commit = Commit(
            name=name,
            task=task.name,
            base=self._last[task.name],
            inputs=[value.decode()],
            reads={key.decode(): old},
            writes={key.decode(): new},
            outputs=[f"{name} {key.decode()}={new}"],
            began=time.monotonic(),
        )
        assert text(store.get(LAST)) == commit.base
        self._recorder.commit(commit)
        put(store, commit)
        task.produce(self._output, key, commit.outputs[0].encode(), partition=message.partition())
        self._last[task.name] = name
        self._left[task.name].append((offset, name))

    def _acknowledged(self, task: Task, source: str) -> None:
        """The newest step that the task's last checkpoint has is acknowledged, and so are all on which it stands."""
        checkpoint, left, name = task.last_checkpoint, self._left[task.name], None
        while checkpoint is not None and left and left[0][0] < checkpoint.input_offsets.get(source, 0):
            _, name = left.popleft()
        if name is not None:
            self._recorder.outcome(name, "ok")


def main() -> int:
    """Run a consumer loop until SIGTERM, or until an error ends it: ``python -m tests.clusters.recording '{…}'``."""
    order = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    config = JobConfig.from_mapping(order["config"])
    counting = Counting(Recorder(Path(order["log"])), order["output"])
    consumer = config.consumer(order["group"])
    try:
        with StateManager(config) as manager:
            manager.run(consumer, counting.process, on_open=counting.opened, topics=[order["topic"]])
    except StatemgrError as error:
        print(error.to_json(), flush=True)
        return 1
    finally:
        consumer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
