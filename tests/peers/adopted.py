"""The new job of an application of Kafka Streams, which goes on as the application would. Starts processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from statemgr import StateManager
from statemgr.ids import task_name
from statemgr.serdes.windows import SessionKey, WindowKey
from tests.old_jobs import Adopter, messages_of
from tests.peers.recount import Content, apply, differences, keeps_keys, known, recount
from tests.peers.streams import Job, Row, Step, some_rows


class Store(MutableMapping[Any, str]):
    """A store of the new job, with keys and values as Kafka Streams prints them."""

    def __init__(self, store: Any, *, numbers: bool) -> None:
        self._store, self._numbers = store, numbers
        #: Keys that have been read → in the store; those of joined rows have a number, too.
        self._read: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> str:
        value = self._store.get(self._ours(key))
        if value is None:
            raise KeyError(key)
        return str(int.from_bytes(value, "big")) if self._numbers else value.decode()

    def __setitem__(self, key: Any, value: str) -> None:
        self._store.put(self._ours(key), int(value).to_bytes(8, "big") if self._numbers else value.encode())

    def __delitem__(self, key: Any) -> None:
        self._store.delete(self._ours(key))

    def __iter__(self) -> Iterator[Any]:
        for ours, _ in self._store.range():
            if isinstance(ours, WindowKey):
                key: Any = ours.key.decode(), ours.start_ms
            elif isinstance(ours, SessionKey):
                key = ours.key.decode(), ours.start_ms, ours.end_ms
            else:
                key = ours.decode()
            self._read[key] = ours
            yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _ours(self, key: Any) -> Any:
        if isinstance(key, str):
            return key.encode()
        of, start, *end = key
        made = SessionKey(of.encode(), start, *end) if end else WindowKey(of.encode(), start)
        return self._read.get(key, made)


class New:
    """The new job of an adopted application.

    Args:
        had: what the stores had that are adopted.
        names: name of a store in the new job → in the application, where they differ.
    """

    def __init__(self, adopter: Adopter, job: Job, had: Mapping[str, Content], names: Mapping[str, str]) -> None:
        self._adopter, self._job, self._had = adopter, job, dict(had)
        self._names = {store: name for name, store in names.items()}

    def check(self) -> None:
        """Check that its state is what the application had, go on with it, roll it back, and rescale it."""
        steps = self._job.named
        self._take_joined_rows()
        self._expect(self._had)
        self._job.end_transactions()
        adopted = [one["checkpoint_id"] for one in self._run("checkpoints list")]
        after: dict[str, Content] = {store: {} for store in self._had}
        goes_on = known(steps) and keeps_keys(steps)
        if goes_on:
            self._job.send(some_rows({row.topic: None for row in self._job.rows}, 3))
            after = {store: of for store, of in recount(steps, self._job.rows).items() if store in self._had}
        else:
            steps = []
        self.process(steps, clear=not goes_on)
        self._expect(after)
        self._run("checkpoints rollback", *(word for one in adopted for word in ("--to", one)), "--write")
        self._expect(self._had)
        self.process(steps)  # a job with unread input is not given another number of tasks
        self._run("rescale", "--tasks", "3")
        assert self._run("rescale", "--tasks", "3", "--write")["partitioner"] == "murmur2"
        assert self._adopter.config.tasks == 3
        self._expect(after if goes_on else self._had)

    def _take_joined_rows(self) -> None:
        """Check stores of rows for joins of streams: the application no longer shows those that it has expired."""
        rows = {((row.key, row.time), row.value) for row in self._job.rows}
        own = {step.get("store") for step in self._job.named}
        for store, content in self.state().items():
            if store not in own:
                lost, more = self._had[store].items() - content.items(), content.items() - rows
                assert not lost | more, f"{store}: {list(lost)[:10]}, {list(more)[:10]}"
                self._had[store] = content

    def _expect(self, wanted: Mapping[str, Content]) -> None:
        found = differences(self.state(), wanted)
        assert not found, f"{len(found)} differ: {found[:20]}"

    def state(self) -> dict[str, Content]:
        """Return what the stores have in all tasks: each key in one task."""
        found: dict[str, Content] = {store: {} for store in self._had}
        with StateManager(self._adopter.config) as manager:
            for number in range(self._adopter.config.tasks):
                with manager.open_task(task_name(number)) as task:
                    for store, of in self._stores(task).items():
                        assert not found[store].keys() & of.keys(), "a key is in two tasks"
                        found[store] |= of
        return found

    def process(self, steps: Sequence[Step], *, clear: bool = False) -> None:
        """Process the rest of the input as these steps of the application would. Or delete everything."""
        with StateManager(self._adopter.config) as manager:
            for number in range(self._adopter.config.tasks):
                with manager.open_task(task_name(number)) as task:
                    assert task.last_checkpoint is not None
                    offsets, stores = dict(task.last_checkpoint.input_offsets), self._stores(task)
                    for source, offset in offsets.items():
                        for message in messages_of(self._job.kafka, source, offset):
                            key, value, (_, at) = message.key(), message.value(), message.timestamp()
                            row = Row(message.topic(), key.decode(), None if value is None else value.decode(), at)
                            apply(steps, stores, row)
                            offsets[source] = message.offset() + 1
                    for store in stores.values() if clear else ():
                        for key in list(store):
                            del store[key]
                    task.commit(offsets)

    def _run(self, name: str, *arguments: str) -> Any:
        return json.loads(self._adopter.command(name, *arguments, "--json"))

    def _stores(self, task: Any) -> dict[str, Store]:
        return {
            store: Store(
                task.store(self._names.get(store, store), value_serde="bytes"),
                numbers=self._job.counts(store),
            )
            for store in self._had
        }
