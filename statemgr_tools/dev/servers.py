"""Starts, stops and describes the servers of one directory, for ``statemgr dev``, the demo and the tests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from statemgr.errors import CorruptError, InvalidError
from statemgr_tools.dev.clouds import AzureServer, GcsServer, find_azurite, find_fake_gcs
from statemgr_tools.dev.jars import broker_jars, broker_jars_are_here
from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.process import Server, free_port, listener, stays_taken
from statemgr_tools.dev.s3 import S3Server, find_versitygw

#: Lists the servers of a directory. Only its owner can read it, because it contains the keys of the local S3 server.
_FILE = "servers.json"
_SERVERS: Mapping[str, type[Server]] = {"kafka": KafkaBroker, "s3": S3Server, "gcs": GcsServer, "azure": AzureServer}


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
    gcs_endpoint: str | None = None
    gcs_bucket: str | None = None
    gcs_pid: int | None = None
    gcs_log: str | None = None
    azure_connection_string: str | None = field(default=None, repr=False)
    azure_container: str | None = None
    azure_pid: int | None = None
    azure_log: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name for JSON, including the keys of the local servers."""
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
    gcs: bool = False,
    azure: bool = False,
    report: Callable[[str], None] = lambda step: None,
) -> DevServers:
    """Start the servers that do not run yet. They keep running after this process ends.

    A second call finds them and changes nothing. After a ``down``, they get the same data again (except moto, which
    keeps objects in memory), and the same ports if these are free and the caller requests no others.

    Args:
        directory: the directory for everything that the servers write.
        kafka: start a Kafka broker.
        s3: start an S3 server.
        kafka_port, s3_port: the ports to listen on. None takes any free port.
        kafka_settings: broker properties, for a new broker.
        s3_kind: ``versitygw`` or ``moto``, for a new server.
        gcs, azure: start a server of Google Cloud Storage or of Azure Blob Storage, on any free port.
        report: called with each step before it begins, for a progress display.

    Raises:
        PrerequisiteMissing, UnavailableError: as the servers' ``start``.
        InvalidError: a requested port is in use, or a server already runs on another port.
    """
    root = Path(directory).absolute()
    known = read_state(root)

    def start(server: Server, name: str) -> None:
        if not server.running:
            report(f"starting {server.name} on port {server.port}")
        server.start(spawned=lambda: _write_state(root, {**known, name: server}))
        known[name] = server

    store = (known.get("s3") or S3Server(directory=root / "s3", kind=s3_kind)) if s3 else None
    if store is not None:
        assert isinstance(store, S3Server)
        _settle_port(store, s3_port, "--s3-port")
        if not store.running and store.kind in (None, "versitygw"):
            if find_versitygw(build=False) is None and shutil.which("go"):
                report("building the S3 server with Go (only the first time)")
            store.choose()  # if there is none, no broker is fetched and started for nothing
    if kafka:
        broker = known.get("kafka") or KafkaBroker(directory=root / "kafka", settings=dict(kafka_settings or {}))
        assert isinstance(broker, KafkaBroker)
        _settle_port(broker, kafka_port, "--kafka-port")
        if not broker.running:
            if stays_taken(broker.controller_port):
                broker.controller_port = free_port()
            if not broker_jars_are_here():
                report("fetching the Kafka broker (44 MB, only the first time)")
                broker_jars()
        start(broker, "kafka")
    if store is not None:
        start(store, "s3")
    for name, wanted, find in (("gcs", gcs, find_fake_gcs), ("azure", azure, find_azurite)):
        if wanted:
            server = known.get(name) or _SERVERS[name](directory=root / name)
            _settle_port(server, None, "")
            if not server.running and find(build=False) is None:
                report(f"installing {server.name} (only the first time)")
            start(server, name)
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


def down(directory: str | Path, keep: Collection[str] = ()) -> bool:
    """Stop the servers of this directory by PID, except those of the kinds ``keep``. Their data stays,
    except moto's.

    Returns: whether any ran.
    """
    stopped = running(directory) - set(keep)
    known = read_state(Path(directory).absolute())
    for kind in stopped:
        known[kind].stop()
    return bool(stopped)


def running(directory: str | Path) -> set[str]:
    """The kinds of the servers of this directory that run."""
    return {kind for kind, server in read_state(Path(directory).absolute()).items() if server.running}


def status(directory: str | Path) -> DevServers:
    """Return the running servers of this directory."""
    root = Path(directory).absolute()
    fields: dict[str, Any] = {}
    for name, server in read_state(root).items():
        if server.process is None or not server.process.running:
            continue
        fields |= {f"{name}_pid": server.process.pid, f"{name}_log": str(server.process.log)}
        match server:
            case KafkaBroker():
                fields["bootstrap_servers"] = server.bootstrap_servers
            case S3Server():
                fields |= {
                    "s3_endpoint": server.endpoint,
                    "s3_bucket": server.bucket,
                    "s3_region": server.region,
                    "s3_access_key": server.access_key,
                    "s3_secret_key": server.secret_key,
                    "s3_server": server.kind,
                }
            case GcsServer():
                fields |= {"gcs_endpoint": server.endpoint, "gcs_bucket": server.bucket}
            case AzureServer():
                fields |= {
                    "azure_connection_string": server.connection_string,
                    "azure_container": server.bucket,
                }
    return DevServers(directory=str(root), **fields)


def _write_state(directory: Path, known: Mapping[str, Server]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: server.to_dict() for name, server in known.items()}
    temporary = directory / f".{_FILE}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(state, file, indent=2)
    os.replace(temporary, directory / _FILE)


def read_state(directory: Path) -> dict[str, Server]:
    """Return the servers that were started in this directory, running or not, by name.

    Raises: CorruptError if the file that lists them cannot be read; InvalidError if the directory is a file.
    """
    path = directory / _FILE
    try:
        state = json.loads(path.read_text())
        return {name: _SERVERS[name].from_dict(directory / name, found) for name, found in state.items()}
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise InvalidError("the servers' directory is a file", directory=str(directory)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            "the file that lists the local servers cannot be read",
            hint=f"stop the servers that still run from {directory} (see the logs there), then remove the file",
            file=str(path),
        ) from error
