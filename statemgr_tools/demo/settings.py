"""The options of the demo, and the files of one run. Writes the run's ``job.toml``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statemgr import JobConfig
from statemgr.errors import InvalidError
from statemgr_tools.dev import DevServers

TASKS = 4
PARTITIONS = 4
JOB = "demo"
FACTORIES = ("kafka-changelog", "blob-store")
#: A file in every directory that the demo made and may therefore remove.
MARKER = ".statemgr-demo"


@dataclass(frozen=True)
class Settings:
    """The options of ``statemgr demo``."""

    directory: Path
    blob: str
    seed: int
    kills: int
    sums: tuple[str, ...]
    key: str
    input: Path | None = None
    aims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """The directory of one run. Every topic's name contains the run's name, so runs never share a topic."""

    root: Path
    name: str

    @property
    def config(self) -> Path:
        return self.root / "job.toml"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "pipeline.log"

    @property
    def topic(self) -> str:
        return f"{JOB}-{self.name}-rows"


def own_directory(path: Path) -> Path:
    """Make a new directory for a run. It replaces only the directory of the run before.

    Raises: InvalidError if the path contains files that the demo did not make.
    """
    if path.is_symlink() or (path.exists() and not (path / MARKER).is_file()):
        if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
            raise InvalidError(
                "the demo's directory contains files that the demo did not write",
                hint="choose another one with `statemgr demo --directory`, or move the files away",
                path=str(path),
            )
    elif path.exists():
        # The marker stays, so that an interrupted removal can be continued.
        for entry in [entry for entry in path.iterdir() if entry.name != MARKER]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER).write_text("`statemgr demo` made this directory, and its next run replaces it.\n")
    return path


def write_config(
    run: Run, settings: Settings, servers: DevServers, restore: Sequence[str], backup: Sequence[str] = FACTORIES
) -> JobConfig:
    """Write ``job.toml`` for the next start, with the backends to restore from and to back up to."""
    values: dict[str, object] = {
        "job.name": JOB,
        "job.id": run.name,
        "job.tasks": TASKS,
        "kafka.bootstrap.servers": servers.bootstrap_servers,
        "state.dir": str(run.state),
        "task.backup.factories": list(backup),
        "task.restore.factories": list(restore),
        "stores.totals.type": "rocksdb",
    }
    if settings.blob == "s3":
        values |= {
            "blob.store.uri": f"s3://{servers.s3_bucket}/demo",
            "blob.store.s3.endpoint": servers.s3_endpoint,
            "blob.store.s3.region": servers.s3_region,
            "blob.store.s3.access.key": f"${{file:{_secret(run, 's3-access-key', servers.s3_access_key)}}}",
            "blob.store.s3.secret.key": f"${{file:{_secret(run, 's3-secret-key', servers.s3_secret_key)}}}",
        }
    elif settings.blob == "gcs":
        values |= {
            "blob.store.uri": f"gs://{servers.gcs_bucket}/demo",
            "blob.store.gcs.endpoint": servers.gcs_endpoint,
        }
    elif settings.blob == "azure":
        text = _secret(run, "azure-connection-string", servers.azure_connection_string)
        values |= {
            "blob.store.uri": f"az://{servers.azure_container}/demo",
            "blob.store.azure.connection.string": f"${{file:{text}}}",
        }
    else:
        values["blob.store.uri"] = (run.root / "blobs").as_uri()
    # JSON's strings, numbers and arrays are TOML's
    lines = [f'"{name}" = {json.dumps(value)}' for name, value in values.items()]
    run.config.write_text("# written by `statemgr demo`\n" + "\n".join(lines) + "\n")
    return JobConfig.from_file(run.config)


def _secret(run: Run, name: str, value: str | None) -> Path:
    path = run.root / name
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(value or "")
    return path
