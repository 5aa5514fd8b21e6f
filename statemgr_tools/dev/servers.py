"""Starts, stops and describes the servers of one directory, for ``statemgr dev``, the demo and the tests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from statemgr.errors import CorruptError, InvalidError
from statemgr_tools.dev.jars import broker_jars, broker_jars_are_here
from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.process import Server, free_port, listener, stays_taken
from statemgr_tools.dev.s3 import S3Server, find_versitygw

#: Lists the servers of a directory. Only its owner can read it, because it contains the keys of the local S3 server.
_FILE = "servers.json"


@dataclass(frozen=True, kw_only=True)
class DevServers:
    """Addresses and keys of the running servers. The fields of a server that does not run are None."""

    directory: str
    bootstrap_servers: str | None = None
    kafka_pid: int | None = None
    kafka_log: str | None = None
    s3_endpoint: str | None = None
    s3_bucket: str | None = None
    s3_region: str | None = None
    s3_access_key: str | None = None
    s3_secret_key: str | None = field(default=None, repr=False)
    s3_server: str | None = None
    s3_pid: int | None = None
    s3_log: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name for JSON, including the secret key of the local server."""
        return asdict(self)


def up(
    directory: str | Path,
    *,
    kafka: bool = True,
    s3: bool = True,
    kafka_port: int | None = None,
    s3_port: int | None = None,
    kafka_settings: Mapping[str, str] | None = None,
    s3_kind: str | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> DevServers:
    """Start the servers that do not run yet. They keep running after this process ends.

    A second call finds them and changes nothing. After a ``down``, they get the same data again, and the same
    ports if these are free and the caller requests no others.

    Args:
        directory: the directory for everything that the servers write.
        kafka: start a Kafka broker.
        s3: start an S3 server.
        kafka_port, s3_port: the ports to listen on. None takes any free port.
        kafka_settings: broker properties, for a new broker.
        s3_kind: ``versitygw`` or ``moto``, for a new server.
        report: called with each step before it begins, for a progress display.

    Raises:
        PrerequisiteMissing, UnavailableError: as the servers' ``start``.
        InvalidError: a requested port is in use, or a server already runs on another port.
    """
    root = Path(directory).absolute()
    broker, store = read_state(root)
    if kafka:
        broker = broker or KafkaBroker(directory=root / "kafka", settings=dict(kafka_settings or {}))
        _settle_port(broker, kafka_port, "--kafka-port")
        if not broker.running:
            if stays_taken(broker.controller_port):
                broker.controller_port = free_port()
            if not broker_jars_are_here():
                report("fetching the Kafka broker (44 MB, only the first time)")
                broker_jars()
            report(f"starting the Kafka broker on port {broker.port}")
        broker.start(spawned=lambda: _write_state(root, broker, store))
    if s3:
        store = store or S3Server(directory=root / "s3", kind=s3_kind)
        _settle_port(store, s3_port, "--s3-port")
        if not store.running:
            if store.kind != "moto" and find_versitygw(build=False) is None and shutil.which("go"):
                report("building the S3 server with Go (only the first time)")
                find_versitygw()
            report(f"starting the S3 server on port {store.port}")
        store.start(spawned=lambda: _write_state(root, broker, store))
    return status(root)


def _settle_port(server: Server, wanted: int | None, option: str) -> None:
    """Give a stopped server the requested port, or a free one. Raises: InvalidError."""
    if server.running:
        if wanted not in (None, server.port):
            raise InvalidError(
                f"{server.name} already runs on port {server.port}",
                hint="stop it with `statemgr dev down` first",
                port=wanted,
            )
        return
    server.port = wanted or server.port
    if not stays_taken(server.port):
        return
    if wanted is not None:
        program = listener(wanted)
        raise InvalidError(
            f"port {wanted} is in use" + (f" by {program}" if program else ""),
            hint=f"choose another port for {server.name} with {option}, or 0 for any free one; --write "
            "puts its address into job.toml",
            port=wanted,
        )
    server.port = free_port()


def down(directory: str | Path) -> bool:
    """Stop the servers of this directory by PID. Their data stays. Returns: whether any ran."""
    root = Path(directory).absolute()
    broker, store = read_state(root)
    stopped = False
    for server in (broker, store):
        if server is not None and server.running:
            server.stop()
            stopped = True
    return stopped


def status(directory: str | Path) -> DevServers:
    """Return the running servers of this directory."""
    root = Path(directory).absolute()
    broker, store = read_state(root)
    fields: dict[str, Any] = {}
    if broker is not None and broker.process is not None and broker.process.running:
        fields |= {
            "bootstrap_servers": broker.bootstrap_servers,
            "kafka_pid": broker.process.pid,
            "kafka_log": str(broker.process.log),
        }
    if store is not None and store.process is not None and store.process.running:
        fields |= {
            "s3_endpoint": store.endpoint,
            "s3_bucket": store.bucket,
            "s3_region": store.region,
            "s3_access_key": store.access_key,
            "s3_secret_key": store.secret_key,
            "s3_server": store.kind,
            "s3_pid": store.process.pid,
            "s3_log": str(store.process.log),
        }
    return DevServers(directory=str(root), **fields)


def _write_state(directory: Path, broker: KafkaBroker | None, store: S3Server | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    servers = {"kafka": broker, "s3": store}
    state = {name: server.to_dict() for name, server in servers.items() if server is not None}
    temporary = directory / f".{_FILE}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(state, file, indent=2)
    os.replace(temporary, directory / _FILE)


def read_state(directory: Path) -> tuple[KafkaBroker | None, S3Server | None]:
    """Return the servers that were started in this directory, running or not, or ``(None, None)``.

    Raises: CorruptError if the file that lists them cannot be read; InvalidError if the directory is a file.
    """
    path = directory / _FILE
    try:
        state = json.loads(path.read_text())
        broker = KafkaBroker.from_dict(directory / "kafka", state["kafka"]) if "kafka" in state else None
        store = S3Server.from_dict(directory / "s3", state["s3"]) if "s3" in state else None
    except FileNotFoundError:
        return None, None
    except NotADirectoryError as error:
        raise InvalidError("the servers' directory is a file", directory=str(directory)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            "the file that lists the local servers cannot be read",
            hint=f"stop the servers that still run from {directory} (see the logs there), then remove the file",
            file=str(path),
        ) from error
    return broker, store
