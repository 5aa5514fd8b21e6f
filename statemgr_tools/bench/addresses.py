"""The servers of a run, named in the configuration or started for the run. Starts and stops processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from statemgr.config import JobConfig
from statemgr_tools.dev import servers

_BLOB = "blob.store."
_KAFKA, _S3 = "kafka", "s3"


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """A bucket, and the prefix that a run may fill in it."""

    endpoint: str
    bucket: str
    prefix: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)

    def settings(self, endpoint: str | None = None) -> dict[str, object]:
        """Return the keys of a job's configuration. ``endpoint`` leads through a proxy."""
        return {
            "blob.store.uri": f"s3://{self.bucket}/{self.prefix}",
            "blob.store.s3.endpoint": endpoint or self.endpoint,
            "blob.store.s3.region": self.region,
            "blob.store.s3.access.key": self.access_key,
            "blob.store.s3.secret.key": self.secret_key,
            "blob.store.s3.path.style": True,
        }


class Servers:
    """Starts each server at its first use. :meth:`close` stops the servers and removes their data.

    Args:
        directory: the directory for the data of started servers.
        given: keys of a configuration; with ``kafka.bootstrap.servers``, no broker is started; with an ``s3://``
            URI, no S3 server.
        prefix: the prefix in a given bucket.
    """

    def __init__(self, directory: Path, given: Mapping[str, object], prefix: str) -> None:
        self._directory = directory
        self._given = given
        self._prefix = prefix
        self._s3: S3Address | None = None
        self._kafka: dict[str, object] | None = None

    def kafka(self) -> Mapping[str, object]:
        """Return the keys ``kafka.*`` of a configuration. Raises: PrerequisiteMissing, UnavailableError."""
        if self._kafka is None:
            self._kafka = {key: value for key, value in self._given.items() if key.startswith("kafka.")}
            if "kafka.bootstrap.servers" not in self._kafka:
                up = servers.up(self._directory / _KAFKA, s3=False)
                self._kafka["kafka.bootstrap.servers"] = str(up.bootstrap_servers)
        return self._kafka

    def s3(self) -> S3Address:
        """Return the bucket. Raises: PrerequisiteMissing, UnavailableError, ConfigError (given without its keys)."""
        if self._s3 is None:
            uri = str(self._given.get("blob.store.uri", ""))
            self._s3 = self._named(uri) if uri.startswith("s3://") else self._local()
        return self._s3

    def close(self) -> None:
        """Stop the started servers, by PID."""
        stop_servers(self._directory)

    def _local(self) -> S3Address:
        up = servers.up(self._directory / _S3, kafka=False)
        return S3Address(
            endpoint=str(up.s3_endpoint),
            bucket=str(up.s3_bucket),
            prefix="bench",
            region=str(up.s3_region),
            access_key=str(up.s3_access_key),
            secret_key=str(up.s3_secret_key),
        )

    def _named(self, uri: str) -> S3Address:
        blob = {key: value for key, value in self._given.items() if key.startswith(_BLOB)}
        s3 = JobConfig.from_mapping({"job.name": "bench", **blob}).blob_s3
        parts = urlsplit(uri)
        return S3Address(
            endpoint=str(s3["endpoint"]),
            bucket=parts.netloc,
            prefix="/".join(part for part in (parts.path.strip("/"), self._prefix) if part),
            region=str(s3.get("region", "us-east-1")),
            access_key=str(s3["access.key"]),
            secret_key=str(s3["secret.key"]),
        )


def stop_servers(directory: Path) -> None:
    """Stop the servers that a run started in a directory, by PID."""
    for name in (_KAFKA, _S3):
        if (directory / name).is_dir():
            servers.down(directory / name)
