"""What the testers of jobs share: a broker and a blob store in memory, a clock that the test moves, and a directory for
local state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

from statemgr.blobs.memory import forget
from statemgr.config import JobConfig
from statemgr.config.loading import has_reference, load_values
from statemgr.config.units import DAY_MS
from statemgr.config.values import Value
from statemgr.errors import InvalidError
from statemgr.ids import IdSource
from statemgr.local.temporary import temporary_directory
from statemgr.manager import StateManager
from statemgr.services import Services
from statemgr.testing.clock import ControlledClock
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr.testing.memory_topics import DEFAULTS
from statemgr.wiring import open_services

#: 1 January 2024, 00:00 UTC.
START_MS = 1_704_067_200_000


_TOPICS = "task.topics."
_REPLACED = ("kafka.", "blob.store.s3.", "blob.store.gcs.", "blob.store.azure.", "metrics.port", "state.dir")
#: A record may be as large as elsewhere,
_RECORD_SIZE = ".message.max.bytes"
#: and a shutdown or a batch may take as long. In place of a reference, it is the longest that Kafka allows: a day.
_POLL_INTERVAL = ".max.poll.interval.ms"


class MemoryServers:
    """The servers of one job, from :meth:`open` to :meth:`close`.

    Args:
        given: the job's configuration, or its mapping. The settings of Kafka, of the blob store's place, of
            ``state.dir`` and of the metrics' port are replaced.
        start_ms: the time at which the clock begins, in epoch milliseconds.

    Attributes:
        config: the configuration on these servers.
    """

    def __init__(self, given: JobConfig | Mapping[str, object], start_ms: int = START_MS) -> None:
        self._id = uuid4().hex
        self.config = _in_memory(self._id, given.values if isinstance(given, JobConfig) else given)
        self.clock = ControlledClock(start_ms)
        self.broker = MemoryBroker(self.clock, self.config.tasks)
        self._numbers = count()
        self._closing = ExitStack()
        self._directory: Path | None = None
        self._was_opened = False

    def open(self) -> None:
        """Start the servers. Raises: InvalidError for the second time."""
        if self._was_opened:
            raise InvalidError("the tester was closed, and its state is gone", hint="make a new tester for each block")
        self._was_opened = True
        self._closing.enter_context(served(self.broker, f"memory:{self._id}"))
        self._directory = self._closing.enter_context(temporary_directory("statemgr-test-"))
        self._closing.callback(forget, self._id)

    def close(self) -> None:
        """Forget everything."""
        self._directory = None
        self._closing.close()

    def check_open(self, tester: str) -> None:
        """Raises: InvalidError before :meth:`open` and after :meth:`close`."""
        if self._directory is None:
            raise InvalidError("the tester is not open", hint=f"use it in a block: `with {tester}(…) as tester:`")

    @property
    def now_ms(self) -> int:
        """The time of the clock, in epoch milliseconds."""
        return self.clock.time_ns() // 1_000_000

    def services(self, config: JobConfig) -> Services:
        """The services of a process of the job."""
        # checkpoint IDs differ by nanoseconds while the clock stands still
        ids = IdSource(time_ns=lambda: self.clock.time_ns() + next(self._numbers), token=lambda: uuid4().hex)
        return open_services(config, self.clock, ids)

    def manager(self, config: JobConfig, partitioner: str) -> StateManager:
        """A state manager of the job."""
        return StateManager(config, partitioner, services=self.services)

    def on_disk(self, config: JobConfig, name: str) -> JobConfig:
        """The configuration with its local state in a directory of this name."""
        assert self._directory is not None
        return JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(self._directory / name)})

    def lose_disk(self, name: str = "*") -> None:
        """Delete the local state of this name, or all of it, as on new machines."""
        assert self._directory is not None
        for directory in self._directory.glob(name):
            rmtree(directory)

    def reconfigure(self, settings: Mapping[str, object]) -> JobConfig:
        """Change keys for all later starts. Returns: the new configuration. Raises: ConfigError."""
        self.config = _in_memory(self._id, self.config.values, settings)
        return self.config

    def restoring_from(self, backend: str) -> JobConfig:
        """Lose the disk. Returns: the configuration, in which this factory restores every store.

        Raises: InvalidError if a store has backups, but none there.
        """
        for store in self.config.stores.values():
            if store.durable and backend not in store.backup_factories:
                raise InvalidError(
                    f"the store {store.name} has no backup in {backend}",
                    hint=f"choose one of {', '.join(store.backup_factories)}, or change task.backup.factories",
                    store=store.name,
                )
        self.lose_disk()
        mapping = self.config.to_mapping()
        kept = {key: value for key, value in mapping.items() if not key.endswith(".restore.factories")}
        return JobConfig.from_mapping(kept, {"task.restore.factories": [backend]})


def _in_memory(name: str, *given: Mapping[str, object]) -> JobConfig:
    """The configuration on a broker and a blob store in memory. Later mappings win. Raises: ConfigError."""
    places = {"kafka.bootstrap.servers": f"memory:{name}", "blob.store.uri": f"memory://{name}"}
    values, _ = load_values(*given, places)  # the job's own blob store may be one that is not installed here
    kept = {key: value for key, value in values.items() if _is_kept(key, value)}
    longest = {key: DAY_MS for key, value in kept.items() if key.endswith(_POLL_INTERVAL) and has_reference(value)}
    return JobConfig.from_mapping({**kept, **longest}, places)


def _is_kept(key: str, value: Value) -> bool:
    """Whether a setting has a meaning without the job's own servers."""
    if key.endswith(_RECORD_SIZE):
        return not has_reference(value)
    if key.endswith(_POLL_INTERVAL):
        return True
    # of the settings of topics, the broker in memory has those of Kafka 4
    return not key.startswith(_REPLACED) and (not key.startswith(_TOPICS) or key.removeprefix(_TOPICS) in DEFAULTS)
