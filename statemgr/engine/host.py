"""The host of a process's attempts: the job's services, and the background work between attempts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from statemgr.config import JobConfig, StoreConfig
from statemgr.flows.committing.attempt_snapshots import AttemptSnapshots
from statemgr.flows.committing.local_copies import Compactions
from statemgr.flows.opening.shared_state import SharedStates
from statemgr.flows.sweep import Sweep
from statemgr.flows.worker import Worker
from statemgr.ids import task_name
from statemgr.local import open_store
from statemgr.ports import LocalStore
from statemgr.services import Services
from statemgr.wiring import open_services


class AttemptHost:
    """What all attempts of a process share.

    Attributes:
        services: the job's services. They open stores for short use.
        attempts: IDs of the attempts that are open.
        background: runs work that nobody waits for.
        closing: closes an attempt that has ended; the next attempt waits for it.
        shared: large states that are open before all of them is here.
    """

    def __init__(self, services: Services) -> None:
        self.services = replace(services, open_store=_open_briefly)
        self.attempts: set[str] = set()
        self.background = services.executors.worker("host", background=True)
        self.closing: Worker[None] = Worker(services, "closing", services.config.job_name, background=True)
        job = services.task_directory(task_name(0)).parent
        self.snapshots = AttemptSnapshots(services)
        self.compactions = Compactions(services, job / "compaction.lock")
        self.shared = SharedStates(self.services)
        self.sweep = Sweep(services)


def attempt_host(config: JobConfig) -> AttemptHost:
    """The host for this configuration, made at the first call."""
    return _host(json.dumps(config.to_mapping(), sort_keys=True))


@lru_cache(maxsize=8)
def _host(mapping: str) -> AttemptHost:
    return AttemptHost(open_services(JobConfig.from_mapping(json.loads(mapping))))


def _open_briefly(store: StoreConfig, directory: Path, _read_first: bool) -> LocalStore:
    return open_store(store.type, directory, store.rocksdb, read_first=True, briefly=True)
