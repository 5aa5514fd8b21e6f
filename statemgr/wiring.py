"""Wiring: the adapters and engines of one process for one job, made when first needed and closed together."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import cache, partial
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol, TypeVar

from statemgr.blobs import open_blob_store
from statemgr.blobs.counting import counts_of
from statemgr.config import JobConfig, StoreConfig
from statemgr.config.factories import BUILT_IN, backend_classes, plugged
from statemgr.errors import AccessDenied, ConfigError, InvalidError, PrerequisiteMissing
from statemgr.ids import IdSource, task_path
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.local import durable, open_store, use_memory
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import SystemClock, Threads, system_ids, this_process
from statemgr.local.shared_directories import Scratch
from statemgr.os_errors import translated
from statemgr.ports import (
    BackupManager,
    BlobStore,
    Changelog,
    Clock,
    Executors,
    LocalDirectories,
    LocalStore,
    Progress,
    RestoreManager,
    StateBackend,
    no_progress,
)
from statemgr.services import Closing, Services
from statemgr.transfer.transfer import Transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C", bound="_Closable")


class _Closable(Protocol):
    def close(self) -> None: ...


def open_services(
    config: JobConfig, clock: Clock | None = None, ids: IdSource | None = None, executors: Executors | None = None
) -> Services:
    """The services of one process for one job. Safe to use from many threads; close them when done."""
    use_memory(config.memory_bytes)
    return _Wiring(config, clock, ids or system_ids(), executors or Threads()).services


#: Modules that a process without threads imports once. All workers are forked from it, and start in milliseconds.
_PRELOADED = ("statemgr.wiring", "boto3", "confluent_kafka.admin", "fastavro", "rocksdict")


class WorkerProcesses:
    """Processes that share the work of this one, each with services of its own for the job.

    ``progress``: called on a thread of this process with what their work passes to :func:`worker_progress`.
    """

    def __init__(self, config: JobConfig, count: int, progress: Progress | None = None) -> None:
        # not forks of this process: the threads of Kafka's client and of RocksDB do not survive one
        context: BaseContext = get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        try:
            forkserver.ensure_running()
        except OSError as error:  # its socket is in TMPDIR, whose path may be too long for one
            log.info("worker processes start one by one: %s", error)
            context = get_context("spawn")
        self._reports = context.SimpleQueue() if progress is not None else None
        if progress is not None:
            threading.Thread(target=_pass_on, args=(self._reports, progress), daemon=True).start()
        self._pool = ProcessPoolExecutor(
            count, context, initializer=_begin_worker, initargs=(config.to_mapping(), self._reports, dict(os.environ))
        )

    def submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Run ``work(services, *arguments)``, a function of a module, in one of the processes."""
        return self._pool.submit(_work, work, *arguments)

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._reports is not None:
            self._reports.put(None)


_worker: list[Services] = []
_reports: list[Any] = []
#: Seconds between two reports of the same work.
_REPORT_S = 0.2


def worker_progress() -> Progress:
    """What reports progress from a worker process to the one that started it."""
    last: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        now_s = _worker[0].clock.monotonic()
        if _reports and (now_s - last.get(what, 0.0) >= _REPORT_S or done == total):
            last[what] = now_s
            _reports[0].put((what, done, total))

    return report


def _pass_on(reports: Any, progress: Progress) -> None:
    while (report := reports.get()) is not None:
        try:
            progress(*report)
        except Exception as error:  # go on reading: the workers wait for that
            log.warning("the progress of the work cannot be shown: %s", error)
            progress = no_progress


def _begin_worker(config: Mapping[str, Any], reports: Any, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # it may have changed since the server of forks was started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    faulthandler.enable()  # if a library crashes, the stacks of all threads are on stderr
    if reports is not None:
        _reports.append(reports)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(open_services(JobConfig.from_mapping(config)))
    Finalize(None, _worker[0].close, exitpriority=1)


def _end_with_parent() -> None:
    """Wait until the process that started this one is gone, and end: nobody would take what this one makes."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(work: Callable[..., T], *arguments: object) -> T:
    return work(_worker[0], *arguments)


class _Wiring:
    """Makes each part once, when it is first asked for."""

    def __init__(self, config: JobConfig, given: Clock | None, ids: IdSource, executors: Executors) -> None:
        clock = given or SystemClock()
        self._config, self._clock, self._ids, self._executors = config, clock, ids, executors
        self._shares_clock = given is not None
        self._lock = threading.RLock()
        self._made: dict[str, Any] = {}
        self._adapters, self._backends = Closing(), Closing()
        # whoever only reads the topic needs no local directory: the job's may be those of another user
        job = config.state_dir / config.job_name / config.job_id
        self._scratch = Scratch(job / "scratch", clock, ids, config.state_dir)
        self.services = Services(
            config=config,
            clock=clock,
            ids=ids,
            executors=executors,
            owner=this_process() if config.owner_published else None,
            scratch=self._scratch,
            blobs=self._blobs,
            # each commit asks for these
            transfer=cache(self._transfer),
            changelog=cache(self._changelog),
            backup_manager=cache(self._backup_manager),
            restore_manager=cache(self._restore_manager),
            task_directory=self._task_directory,
            directories=self._directories,
            open_store=_open_store,
            give_up=self._give_up,
            close=self._close,
        )

    def _once(self, name: str, make: Callable[[], T]) -> T:
        with self._lock:
            if name not in self._made:
                self._made[name] = make()
            found: T = self._made[name]
            return found

    def _opened(self, name: str, make: Callable[[], C]) -> C:
        """As :meth:`_once`, for what has to be closed."""

        def opened() -> C:
            made = make()
            self._adapters.callback(made.close)
            return made

        return self._once(name, opened)

    def _blobs(self) -> BlobStore:
        return self._opened("blobs", lambda: open_blob_store(self._config, self._clock))

    def _transfer(self) -> Transfer:
        config = self._config

        def make() -> Transfer:
            with suppress(InvalidError, AccessDenied):  # of another user; a transfer that uses it says so
                self._scratch.tidy()  # needed even if no transfer uses it
            return Transfer(
                self._blobs(),
                self._clock,
                self._executors,
                parallelism=config.parallelism,
                part_size=config.part_size,
                ttl_days=config.ttl_days,
                most_bytes=config.inflight_bytes,
                compress_in=partial(self.services.scratch_file, "frame") if config.compresses else None,
                # a second request does not help when a store on this machine is slow
                hedged=not (config.blob_uri or "").startswith(("file:", "memory:")),
                patience_s=config.commit_timeout_ms / 1000,
                counts=counts_of(config.job_key),
            )

        return self._opened("transfer", make)

    def _changelog(self) -> Changelog:
        make = partial(ChangelogTopics, self._config, self._clock, self._ids)
        return self._opened("changelog", make)

    def _backend(self, factory: str) -> StateBackend:
        """The backend that a factory name, an entry point or a dotted path stands for. Raises: ConfigError."""

        def make() -> StateBackend:
            loaded = _load(factory)
            backend = self._of(factory, lambda: loaded(self.services), StateBackend)
            self._backends.callback(backend.close)
            return backend

        return self._once(f"backend {factory}", make)

    def _backup_manager(self, factory: str) -> BackupManager:
        make = partial(self._of, factory, lambda: self._backend(factory).backup_manager(), BackupManager)
        return self._once(f"backup {factory}", make)

    def _restore_manager(self, factory: str) -> RestoreManager:
        make = partial(self._of, factory, lambda: self._backend(factory).restore_manager(), RestoreManager)
        return self._once(f"restore {factory}", make)

    def _of(self, factory: str, make: Callable[[], T], kind: type) -> T:
        """A part of a backend. Raises: ConfigError if the backend of another package fails, or gives something else."""
        return make() if factory in BUILT_IN else plugged(_named(factory), make, kind, hide=self._config.hider())

    def _task_directory(self, task: str) -> Path:
        """Raises: InvalidError when a link stands on the way to it; AccessDenied."""
        config = self._config
        with translated("cannot use state.dir", config.state_dir):
            return durable.check_private(config.state_dir, config.job_name, config.job_id, task_path(task))

    def _directories(self, task: str, store: str) -> LocalDirectories:
        def make() -> StoreDirectories:
            return StoreDirectories(self._task_directory(task) / store, self._clock, self._ids, self._config.state_dir)

        return self._opened(f"directories {task} {store}", make)

    def _give_up(self) -> None:
        self._clock.give_up()
        blobs = self._made.get("blobs")
        if blobs is not None:
            blobs.close()

    def _close(self) -> None:
        """Close running work and backends, which use adapters, and then the adapters, newest first. An error of one
        leaves no other open."""
        with Closing() as closing:
            closing.callback(self._scratch.close)
            closing.callback(self._close_made)
            closing.callback(self._executors.close)
            if not self._shares_clock:
                closing.callback(self._give_up)  # nobody waits any more for what still runs in the background

    def _close_made(self) -> None:
        with self._lock, Closing() as closing:
            closing.callback(self._made.clear)
            closing.callback(self._adapters.close)
            closing.callback(self._backends.close)


def _open_store(store: StoreConfig, directory: Path, read_first: bool) -> LocalStore:
    return open_store(store.type, directory, store.rocksdb, read_first=read_first)


def _load(factory: str) -> Callable[[Services], StateBackend]:
    # built-in backends do not need the metadata of every installed package
    target = BUILT_IN.get(factory) or backend_classes().get(factory, factory)
    module, _, attribute = target.replace(":", ".").rpartition(".")
    if factory in BUILT_IN:
        built_in: Callable[[Services], StateBackend] = getattr(importlib.import_module(module), attribute)
        return built_in

    def unknown() -> ConfigError:
        return ConfigError(
            f"no state backend is called {factory!r}",
            hint=f"choose one of {', '.join(sorted(backend_classes()))}, or a dotted path to a class",
        )

    try:
        found = plugged(_named(factory), lambda: importlib.import_module(module))
    except PrerequisiteMissing as missing:
        if f"{module}.".startswith(f"{missing.where['module']}."):
            raise unknown() from missing
        raise
    loaded: Callable[[Services], StateBackend] | None = getattr(found, attribute, None)
    if loaded is None:
        raise unknown()
    return loaded


def _named(factory: str) -> str:
    target = backend_classes().get(factory)
    return f"the state backend {factory!r}" + (f" ({target})" if target else "")
