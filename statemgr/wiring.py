"""Wiring: the adapters and engines of one process for one job, made when first needed and closed together."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from statemgr.backends.services import BackendContext
from statemgr.blobs import open_blob_store
from statemgr.config import JobConfig, StoreConfig
from statemgr.errors import ConfigError
from statemgr.flows.attempt_snapshots import SnapshotOffers
from statemgr.flows.compaction import Compactions
from statemgr.flows.parts import Parts
from statemgr.flows.sweep import Sweep
from statemgr.ids import IdSource, task_path
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.local import levels, open_store, use_memory
from statemgr.local.clock import SystemClock, system_ids
from statemgr.local.directories import StoreDirectories
from statemgr.local.scratch import Scratch
from statemgr.ports import BlobStore, Changelog, Clock, LocalDirectories, LocalStore, StateBackend
from statemgr.transfer.transfer import Transfer

T = TypeVar("T")
_BACKEND = "backend "
_BUILT_IN = {
    "kafka-changelog": "statemgr.backends.changelog.backend:KafkaChangelogBackend",
    "blob-store": "statemgr.backends.blobs.backend:BlobStoreBackend",
}


class Runtime:
    """All that one process needs for one job. Safe to use from many threads; close it when done."""

    def __init__(self, config: JobConfig, clock: Clock | None = None, ids: IdSource | None = None) -> None:
        self.config = config
        use_memory(config.memory_bytes)
        self.clock = clock or SystemClock()
        self.ids = ids or system_ids()
        self._lock = threading.RLock()
        self._made: dict[str, Any] = {}
        self._to_close: list[tuple[str, Callable[[], None]]] = []
        #: IDs of the attempts that are open in this process.
        self.attempts: set[str] = set()
        job = levels.check(config.state_dir, config.job_name, config.job_id)
        self.scratch = Scratch(job / "scratch", self.clock, self.ids, config.state_dir)
        context = BackendContext(
            config=config,
            clock=self.clock,
            ids=self.ids,
            scratch=self.scratch,
            blobs=self.blobs,
            transfer=self.transfer,
            task_directory=self._task_directory,
            changelog=self.changelog,
        )
        self._context = context
        self.parts = Parts(
            config=config,
            clock=self.clock,
            ids=self.ids,
            blobs=self.blobs,
            transfer=self.transfer,
            changelog=self.changelog,
            backup_manager=lambda factory: self._once(
                f"backup {factory}", lambda: self.backend(factory).backup_manager()
            ),
            restore_manager=lambda factory: self._once(
                f"restore {factory}", lambda: self.backend(factory).restore_manager()
            ),
            directories=self._directories,
            open_store=_open_store,
            task_directory=self._task_directory,
        )

        #: For the stores of attempts, which are open for a moment only.
        self.attempt_parts = replace(self.parts, open_store=_open_briefly)
        self.offers = SnapshotOffers(self.parts)
        self.compactions = Compactions(self.parts, job / "compaction.lock")
        self.sweep = Sweep(self.parts, job / "swept")

    def blobs(self) -> BlobStore:
        return self._once("blobs", lambda: open_blob_store(self.config, self.clock), BlobStore.close)

    def transfer(self) -> Transfer:
        config = self.config

        def make() -> Transfer:
            self.scratch.tidy()  # also where nothing of what follows needs it
            return Transfer(
                self.blobs(),
                parallelism=config.parallelism,
                part_size=config.part_size,
                ttl_days=config.ttl_days,
                most_bytes=config.inflight_bytes,
                compress_in=self.scratch if config.compresses else None,
                # a store on this machine has no slow moments that a second request would avoid
                hedge_by=None if (config.blob_uri or "").startswith(("file:", "memory:")) else self.clock,
                patience_s=config.commit_timeout_ms / 1000,
            )

        return self._once("transfer", make, Transfer.close)

    def changelog(self) -> Changelog:
        return self._once("changelog", lambda: ChangelogTopics(self.config, self.clock), ChangelogTopics.close)

    def backend(self, factory: str) -> StateBackend:
        """The backend that a factory name, an entry point or a dotted path stands for. Raises: ConfigError."""
        return self._once(f"{_BACKEND}{factory}", lambda: _load(factory)(self._context), lambda b: b.close())

    def give_up(self) -> None:
        """End what is in progress on any thread: every deadline has passed, and requests to the blob store fail.

        After this the runtime can only be closed.
        """
        give_up = getattr(self.clock, "give_up", None)
        if give_up is not None:
            give_up()
        blobs = self._made.get("blobs")
        if blobs is not None:
            blobs.close()

    def close(self) -> None:
        """Close everything, newest first, but backends before what they use."""
        self.offers.close()
        self.compactions.close()
        with self._lock:
            self._to_close.sort(key=lambda item: item[0].startswith(_BACKEND))
            while self._to_close:
                self._to_close.pop()[1]()
            self._made.clear()
        self.scratch.close()

    def _once(self, name: str, make: Callable[[], T], close: Callable[[Any], None] | None = None) -> T:
        with self._lock:
            if name not in self._made:
                self._made[name] = made = make()
                if close is not None:
                    self._to_close.append((name, lambda: close(made)))
            found: T = self._made[name]
            return found

    def _task_directory(self, task: str) -> Path:
        """Raises: InvalidError when a link stands on the way to it."""
        return levels.check(self.config.state_dir, self.config.job_name, self.config.job_id, task_path(task))

    def _directories(self, task: str, store: str) -> LocalDirectories:
        return self._once(
            f"directories {task} {store}",
            lambda: StoreDirectories(self._task_directory(task) / store, self.clock, self.ids, self.config.state_dir),
        )


def _open_store(store: StoreConfig, directory: Path, read_first: bool) -> LocalStore:
    return open_store(store.type, directory, store.rocksdb, read_first=read_first)


def _open_briefly(store: StoreConfig, directory: Path, read_first: bool) -> LocalStore:
    return open_store(store.type, directory, store.rocksdb, read_first=read_first, briefly=True)


def _load(factory: str) -> Callable[[BackendContext], StateBackend]:
    found: dict[str, str] = {}
    target = _BUILT_IN.get(factory)
    if target is None:  # else no need to read every installed package's metadata
        found = {entry.name: entry.value for entry in entry_points(group="statemgr.state_backends")}
        target = found.get(factory, factory)
    module, _, attribute = target.replace(":", ".").rpartition(".")
    try:
        loaded: Callable[[BackendContext], StateBackend] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"no state backend is called {factory!r}",
            hint=f"one of {', '.join(sorted({*found, *_BUILT_IN}))}, or a dotted path to a class",
        ) from error
    return loaded


def shared_runtime(config: JobConfig) -> Runtime:
    """One runtime per process and configuration: executors open many short attempts."""
    return _shared(json.dumps(config.to_mapping(), sort_keys=True))


@lru_cache(maxsize=8)
def _shared(mapping: str) -> Runtime:
    return Runtime(JobConfig.from_mapping(json.loads(mapping)))
