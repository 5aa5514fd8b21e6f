"""The servers of a run, named in the configuration or started for the run.

Starts and stops processes, and removes what the run has left on servers that it has not started.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from statemgr.config import JobConfig
from statemgr.errors import ConfigError, StatemgrError
from statemgr.ids import topic_name
from statemgr.kafka.clients import REQUEST_S
from statemgr.kafka.errors import translated
from statemgr.kafka.topics import TopicAdmin
from statemgr.local.machine import SystemClock
from statemgr_tools.dev import servers

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

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

    def client(self) -> S3Client:
        """Return a client of plain boto3 for eight threads."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                max_pool_connections=8,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
            ),
        )

    def remove(self, name: str = "") -> None:
        """Delete everything below ``name``; without it, everything below the prefix.

        Raises: UnavailableError, AccessDenied.
        """
        from statemgr.blobs.s3.errors import translated as of_s3

        below = f"{self.prefix}/{name}/" if name else f"{self.prefix}/"
        with of_s3(self.bucket), closing(self.client()) as client:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=below):
                for found in page.get("Contents", ()):
                    client.delete_object(Bucket=self.bucket, Key=found["Key"])


class Servers:
    """Starts each server at its first use. :meth:`close` stops the servers and removes the run's data.

    Args:
        directory: the directory for the data of started servers.
        given: keys of a configuration; with ``kafka.bootstrap.servers``, no broker is started; with an ``s3://``
            URI, no S3 server.
        run: the name of the run: its prefix in a given bucket, and part of the names of its topics.
    """

    def __init__(self, directory: Path, given: Mapping[str, object], run: str) -> None:
        self._directory = directory
        self._given = given
        self._run = run
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
        """Return the bucket. Raises: PrerequisiteMissing, UnavailableError, ConfigError (settings are missing)."""
        if self._s3 is None:
            self._s3 = self._named() if self._is_s3_given else self._local()
        return self._s3

    def close(self) -> list[StatemgrError]:
        """Stop the started servers, by PID, and remove the run's blobs and topics from given ones.

        Returns: the errors of what was not removed. The results of hours must not be lost with them.
        """
        parts = [partial(stop_servers, self._directory)]
        if self._s3 is not None and self._is_s3_given:
            parts.append(partial(self._s3.remove))
        if self._kafka is not None and "kafka.bootstrap.servers" in self._given:
            parts.append(partial(self._delete_topics, self._kafka))
        errors = []
        for part in parts:
            try:
                part()
            except StatemgrError as error:
                errors.append(error)
        return errors

    def _delete_topics(self, kafka: Mapping[str, object]) -> None:
        """Delete the topics whose names contain the run's, also as part of a checkpoint topic's name."""
        own = (self._run, topic_name(self._run))
        with TopicAdmin(JobConfig.from_mapping({"job.name": "bench", **kafka}), SystemClock()) as admin:
            with translated("listing topics", admin.errors):
                found = admin.client.list_topics(timeout=REQUEST_S).topics
            for topic in found:
                if any(name in topic for name in own):
                    admin.delete(topic)

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

    @property
    def _is_s3_given(self) -> bool:
        return str(self._given.get("blob.store.uri", "")).startswith("s3://")

    def _named(self) -> S3Address:
        blob = {key: value for key, value in self._given.items() if key.startswith(_BLOB)}
        s3 = JobConfig.from_mapping({"job.name": "bench", **blob}).blob_s3
        for name in ("endpoint", "access.key", "secret.key"):
            if not s3.get(name):
                raise ConfigError(
                    f"the benchmark needs {_BLOB}s3.{name}, because plain code and peers use the same S3 server",
                    hint=f"set it in the configuration, or with --set {_BLOB}s3.{name}=VALUE",
                    key=f"{_BLOB}s3.{name}",
                )
        parts = urlsplit(str(self._given["blob.store.uri"]))
        return S3Address(
            endpoint=str(s3["endpoint"]),
            bucket=parts.netloc,
            prefix="/".join(part for part in (parts.path.strip("/"), self._run) if part),
            region=str(s3.get("region", "us-east-1")),
            access_key=str(s3["access.key"]),
            secret_key=str(s3["secret.key"]),
        )


def stop_servers(directory: Path) -> None:
    """Stop the servers that a run started in a directory, by PID."""
    for name in (_KAFKA, _S3):
        if (directory / name).is_dir():
            servers.down(directory / name)
