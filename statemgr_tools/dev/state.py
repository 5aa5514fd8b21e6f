"""The file that lists the servers of ``dev up``, so that ``dev status`` and ``dev down`` find them.

Only its owner can read it, because it contains the keys of the local S3 server.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from statemgr.errors import CorruptError, InvalidError
from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.process import ServerProcess
from statemgr_tools.dev.s3 import S3Server

_FILE = "servers.json"


def write_state(directory: Path, kafka: KafkaBroker | None, s3: S3Server | None) -> None:
    """Replace the state file atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {}
    if kafka is not None:
        state["kafka"] = {
            "port": kafka.port,
            "controller_port": kafka.controller_port,
            "settings": dict(kafka.settings),
            "process": _process_to_json(kafka.process),
        }
    if s3 is not None:
        state["s3"] = {
            "kind": s3.kind,
            "port": s3.port,
            "bucket": s3.bucket,
            "access_key": s3.access_key,
            "secret_key": s3.secret_key,
            "process": _process_to_json(s3.process),
        }
    temporary = directory / f".{_FILE}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(state, file, indent=2)
    os.replace(temporary, directory / _FILE)


def read_state(directory: Path) -> tuple[KafkaBroker | None, S3Server | None]:
    """The servers that were started in this directory, running or not, or ``(None, None)``.

    Raises: CorruptError if :func:`write_state` did not write the file; InvalidError if the directory is a file.
    """
    path = directory / _FILE
    try:
        state = json.loads(path.read_text())
        return _kafka(directory, state.get("kafka")), _s3(directory, state.get("s3"))
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


def _kafka(directory: Path, state: dict[str, Any] | None) -> KafkaBroker | None:
    if state is None:
        return None
    return KafkaBroker(
        directory=directory / "kafka",
        port=state["port"],
        controller_port=state["controller_port"],
        settings=state["settings"],
        process=_process_from_json(state["process"]),
    )


def _s3(directory: Path, state: dict[str, Any] | None) -> S3Server | None:
    if state is None:
        return None
    return S3Server(
        directory=directory / "s3",
        kind=state["kind"],
        port=state["port"],
        bucket=state["bucket"],
        access_key=state["access_key"],
        secret_key=state["secret_key"],
        process=_process_from_json(state["process"]),
    )


def _process_to_json(process: ServerProcess | None) -> dict[str, Any] | None:
    if process is None:
        return None
    return {"pid": process.pid, "started_at": process.started_at, "log": str(process.log)}


def _process_from_json(state: dict[str, Any] | None) -> ServerProcess | None:
    if state is None:
        return None
    return ServerProcess(pid=state["pid"], started_at=state["started_at"], log=Path(state["log"]))
