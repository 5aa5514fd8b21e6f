"""restore(commit(x)) = x on a real broker, for any sequence of writes, commits and restarts, and for each backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statemgr import JobConfig, StateManager
from tests.commits import TASK, Items, published, write
from tests.jobs import DUAL, elsewhere, job_mapping
from tests.servers import KafkaServer

STORES = ("totals", "index")
#: Few keys, so that overwrites and deletes of existing keys are common. They include the empty key and prefixes.
KEYS = st.sampled_from([b"", b"a", b"aa", b"b", b"\x00", b"\xff\xff", b"key"]) | st.binary(max_size=3)
VALUES = st.none() | st.sampled_from([b"", b"1"]) | st.binary(max_size=40) | st.just(b"large" * 8000)
WRITE = st.tuples(st.just("write"), st.sampled_from(STORES), st.dictionaries(KEYS, VALUES, min_size=1, max_size=6))
COMMIT = st.tuples(st.just("commit"))
#: Restart on another machine that restores from one backend, or on this machine.
RESTART = st.tuples(st.just("restart"), st.sampled_from(["first", "last", "here"]))
STEPS = st.lists(st.one_of(WRITE, WRITE, WRITE, COMMIT, COMMIT, RESTART), min_size=1, max_size=14)


class Job:
    """A job under test and its model: the written content and the committed content."""

    def __init__(self, config: JobConfig, directory: Any) -> None:
        self.config = config
        self._directory = directory
        self._machines = 0
        self._stack = ExitStack()
        self.written: dict[str, dict[bytes, bytes]] = {store: {} for store in STORES}
        self.committed: dict[str, dict[bytes, bytes]] | None = None
        self.commits = 0
        self._open(config)

    def _open(self, config: JobConfig) -> None:
        manager = self._stack.enter_context(StateManager(config))
        self.task = self._stack.enter_context(manager.open_task(TASK))

    def write(self, store: str, items: Items) -> None:
        """Put and delete keys."""
        write(self.task, items, (store,))
        for key, value in items.items():
            if value is None:
                self.written[store].pop(key, None)
            else:
                self.written[store][key] = value

    def commit(self) -> None:
        """Publish everything under the next input offset."""
        self.commits += 1
        self.task.commit({"orders-0": self.commits})
        self.committed = {store: dict(content) for store, content in self.written.items()}

    def restart(self, where: str) -> None:
        """Close without a commit and open again. Only committed content is there."""
        self._stack.close()
        config = self.config
        if where != "here":
            factories = self.config.stores["totals"].backup_factories
            where = factories[0 if where == "first" else -1]
            self._machines += 1
            config = elsewhere(self.config, self._directory / f"machine-{self._machines}", where)
        self._open(config)
        self.written = {store: dict(content) for store, content in (self.committed or {s: {} for s in STORES}).items()}
        checkpoint = self.task.last_checkpoint
        assert (checkpoint.input_offsets if checkpoint else {}) == ({"orders-0": self.commits} if self.commits else {})
        self.check_open()
        if where != "here" and self.committed is not None:
            assert {restore.factory for restore in self.task.restored} == {where}

    def check_open(self) -> None:
        """Check that the open stores hold the written content in key order."""
        for store in STORES:
            items = list(self.task.store(store).range())
            assert dict(items) == self.written[store]
            assert items == sorted(items)

    def close(self) -> None:
        """Close the task and its manager."""
        self._stack.close()


@pytest.mark.parametrize(("factories", "interval"), [(DUAL, "1 commit"), (("blob-store",), "2 commits")])
@settings(max_examples=max(settings().max_examples // 10, 3), suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_what_was_committed_is_restored(
    kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory, factories: Sequence[str], interval: str,
    steps: list[tuple[Any, ...]],
) -> None:  # fmt: skip
    """Invariants 4 and 11: after any history, each backend returns exactly the last commit and its input offsets."""
    directory = tmp_path_factory.mktemp("job")
    mapping = job_mapping(
        kafka, directory, backup=factories, stores=STORES, task__commit__snapshot__interval=[interval],
        stores__totals__write__batch__size=3,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "statemgr.flows.committing.persist_ahead.AHEAD_BYTES", 100
        )  # store many changes ahead of their commit
        job = Job(JobConfig.from_mapping(mapping), directory)
        try:
            for step in steps:
                getattr(job, step[0])(*step[1:])
            job.check_open()
        finally:
            job.close()
    for factory in factories:
        found = published(job.config, factory)
        assert found == ({TASK: job.committed} if job.committed is not None else {})
