"""Known faults of state IDs and local directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import statemgr.engine.task as engine_task
import statemgr.flows.opening.open_job as open_job
import statemgr.flows.opening.opening_checks as opening_checks
import statemgr.flows.opening.restore as restoring
import statemgr.local.directories as local_directories
import statemgr.local.shared_directories as shared_directories
import statemgr.operations.migrate.verify as verifying
from statemgr.errors import (
    MissingError,
    RetryableError,
    UnavailableError,
)
from statemgr.stores.open_store import OpenStore
from tests.simulation.known_faults.registry import Patches, imported, known, patch

# --- state IDs and local directories ---------------------------------------------------------------------------------


@known
def state_id_is_not_new() -> Patches:
    """Changed content keeps its state ID, and counts as unchanged."""
    real = OpenStore.freeze

    def freeze(self: Any, state_id: str, *, snapshot: bool) -> Any:
        return real(self, self.state_id or state_id, snapshot=snapshot)

    return [patch(OpenStore, "freeze", freeze)]


@known
def state_id_by_number() -> Patches:
    """State IDs are numbers of commits, so that two owners' different states have the same (Spark's versions)."""
    real = imported(engine_task, "freeze")

    def freeze(services: Any, stores: Any, base: Any, *args: Any, **more: Any) -> Any:
        frozen = real(services, stores, base, *args, **more)
        number = base.checkpoint.sequence + 1 if base.checkpoint else 1
        parts = {
            name: replace(part, state_id=f"{number}-{0:016x}-{name}") if stores[name].changed else part
            for name, part in frozen.stores.items()
        }
        return replace(frozen, stores=parts)

    return [patch(engine_task, "freeze", freeze)]


@known
def buffered_changes_do_not_count() -> Patches:
    """A store whose changes are still in the write buffer counts as unchanged."""
    return [
        patch(
            OpenStore,
            "changed",
            property(lambda self: self.state_id is None or self.local.sequence_number != self._committed_at),
        )
    ]


@known
def unchanged_stores_get_new_ids() -> Patches:
    """Every commit stores every store again, changed or not."""
    return [patch(OpenStore, "changed", property(lambda self: True))]


@known
def local_directory_of_another_state() -> Patches:
    """An opening uses whatever local directory there is."""
    real = local_directories.StoreDirectories.find

    def find(self: Any, state_id: str) -> Any:
        found = real(self, state_id)
        for other in self.reusable() if found is None else ():
            return replace(other, state_id=state_id)
        return found

    return [patch(local_directories.StoreDirectories, "find", find)]


@known
def live_directory_is_continued() -> Patches:
    """After a crash the live database is continued (Kafka Streams: a checkpoint file survived under EOS)."""
    real = local_directories.StoreDirectories.clone

    def clone(self: Any, committed: Any) -> Any:
        live = real(self, committed)
        left = sorted(self._root.joinpath("live").iterdir(), key=lambda path: path.name)
        for other in reversed(left):
            if other != live and committed is not None and any(other.iterdir()):
                import shutil

                for name in os.listdir(other):
                    with suppress(FileNotFoundError):
                        os.unlink(live / name)
                    shutil.copy(other / name, live / name)
                break
        return live

    return [patch(local_directories.StoreDirectories, "clone", clone)]


@known
def lock_is_not_released() -> Patches:
    """A lock of the local directories is held until its process ends."""

    @contextmanager
    def exclusive(lock: Any, clock: Any) -> Iterator[bool]:
        descriptor = imported(shared_directories, "durable").open_regular(lock, shared_directories._FLAGS)
        deadline = clock.monotonic() + 60
        while not shared_directories._locked(descriptor):
            if clock.monotonic() >= deadline:
                raise UnavailableError("locked")
            clock.sleep(1)
        yield True

    return [patch(shared_directories, "exclusive", exclusive)]


@known
def directories_in_use_are_removed() -> Patches:
    """Tidying removes the live and staging directories of processes that still run."""
    return [patch(local_directories.StoreDirectories, "_alive", lambda self: set())]


@known
def a_full_disk_has_no_type() -> Patches:
    """The comparison of two backends ends with an error of the operating system when the disk is full."""
    return [patch(verifying, "disk_errors", lambda path: nullcontext())]


@known
def a_lost_topic_is_an_empty_start() -> Patches:
    """A job whose checkpoint topic was deleted starts empty, although blobs or this machine show that it had state."""
    return [
        patch(open_job, "refuse_lost_job", lambda services: None),
        patch(opening_checks, "_state_of_task", lambda *args: None),
    ]


@known
def missing_state_starts_empty() -> Patches:
    """A state that nothing can supply is an empty start."""
    real = restoring._Restore.restore

    def restore(self: Any) -> Any:
        try:
            return real(self)
        except (MissingError, RetryableError):
            return None, restoring.StoreRestore(self.plan.store, "empty")

    return [patch(restoring._Restore, "restore", restore)]
