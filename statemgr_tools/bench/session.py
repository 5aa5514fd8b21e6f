"""One run: its sizes and rounds, its work directory and servers, and the objects that its cases share.

Writes only in its work directory, below its own prefix of a given bucket, and to topics with its own name. It removes
all of that, except the builds of the peers and what their harnesses write to given servers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from statemgr.config import JobConfig
from statemgr.terminal.output import describe, show_error
from statemgr_tools.bench.addresses import Servers, stop_servers
from statemgr_tools.bench.measure import Report
from statemgr_tools.bench.peers.catalogue import Peers

T = TypeVar("T")
GIBIBYTE = 1024**3
MEBIBYTE = 1024**2
#: ``--size small`` is this share of the table's sizes.
SMALL = 1 / 512
_PREFIX, _SERVERS, _OWNER = "run-", "servers", "owner.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of the user.

    Args:
        scale: share of the table's sizes; 1 is the table.
        rounds: the number of measurements of each variant.
        work: the directory for everything that a run writes.
        peers: directory of the peers' harnesses, None without them.
        given: keys of a configuration, for servers that already run.
    """

    scale: float = 1.0
    rounds: int = 3
    work: Path
    peers: Path | None = None
    given: Mapping[str, object] = field(default_factory=dict)


class Session:
    """The services that a case uses. A context manager that stops servers and removes data at its end."""

    def __init__(self, plan: Plan, report: Report = lambda what: None) -> None:
        self.plan = plan
        self.report = report
        self.rounds = plan.rounds
        plan.work.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(plan.work)
        self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=plan.work)).absolute()
        owner = psutil.Process()
        (self.directory / _OWNER).write_text(json.dumps([owner.pid, owner.create_time()]))
        self.servers = Servers(self.directory / _SERVERS, plan.given, self.directory.name)
        self.peers = Peers(plan.peers, plan.work.absolute() / "peers", report)
        self._shared: dict[str, Any] = {}
        self._jobs = 0

    @property
    def full(self) -> bool:
        """Whether the sizes are those of the table, so that its targets hold."""
        return self.plan.scale >= 1

    def bytes(self, full: int, least: int = MEBIBYTE) -> int:
        """Return the scaled number of bytes."""
        return self.count(full, least)

    def count(self, full: int, least: int = 100) -> int:
        """Return the scaled number of records, files or rounds."""
        return max(min(full, least), int(full * min(self.plan.scale, 1)))

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """Return an object that several cases use. It is made once."""
        if name not in self._shared:
            self._shared[name] = make()
        found: T = self._shared[name]
        return found

    def fresh(self, name: str) -> Path:
        """Make a new directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.directory))

    def bucket(self, name: str) -> str:
        """Return the name of a peer's own bucket, made of lower-case letters, digits and hyphens."""
        return f"bench-{name}-{self.directory.name}".replace("_", "-").lower()

    def job(
        self,
        name: str,
        *,
        kafka: bool = True,
        s3: bool = False,
        overrides: Mapping[str, object] | None = None,
        **settings: object,
    ) -> JobConfig:
        """Return a new job with one store ``s``. Keys in ``settings`` use ``__`` for ``.``; ``overrides`` win."""
        self._jobs += 1
        unique = f"{name}-{self.directory.name}-{self._jobs}"
        mapping: dict[str, object] = {
            "job.name": unique,
            "state.dir": str(self.directory / "state" / unique),
            "stores.s.type": "rocksdb",
            "task.checkpoint.retained": 1,
        }
        if kafka:
            mapping |= self.servers.kafka()
        if s3:
            mapping |= self.servers.s3().settings()
        else:
            mapping["blob.store.uri"] = (self.directory / "blobs").as_uri()
        mapping |= {key.replace("__", "."): value for key, value in settings.items()}
        return JobConfig.from_mapping(mapping, overrides or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for left in self.servers.close():
                show_error(f"not removed: {describe(left)}", left.hint)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


def changed(config: JobConfig, **settings: object) -> JobConfig:
    """Return the same job with some keys changed (``__`` for ``.``)."""
    return JobConfig.from_mapping(
        config.to_mapping(), {key.replace("__", "."): value for key, value in settings.items()}
    )


def _remove_leftovers(work: Path) -> None:
    """Stop the servers (by PID) and remove the data of earlier runs that were killed."""
    for directory in work.glob(f"{_PREFIX}*"):
        try:
            pid, created = json.loads((directory / _OWNER).read_text())
            runs = abs(psutil.Process(pid).create_time() - created) < 1
        except (OSError, ValueError, psutil.NoSuchProcess):
            runs = False
        if not runs:
            stop_servers(directory / _SERVERS)
            shutil.rmtree(directory, ignore_errors=True)
