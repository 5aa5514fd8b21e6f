"""The Kafka broker and the S3 server of the test suite.

The environment selects one of three kinds: servers that already run (``STATEMGR_TEST_KAFKA``,
``STATEMGR_TEST_S3_ENDPOINT`` …), containers (``STATEMGR_TEST_SERVERS=containers``), or local processes (the default). A
run's servers start at first use, serve all of its workers and stop at its end. If a run is killed, the next run stops
its servers.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from filelock import FileLock

from statemgr_tools.dev import down, up

RUN_DIRECTORY_VARIABLE = "STATEMGR_TEST_RUN_DIR"
_RUN_PREFIX = "statemgr-tests-"
_CP_KAFKA_IMAGE = "confluentinc/cp-kafka:8.1.1"
_VERSITYGW_IMAGE = "versity/versitygw:v1.8.0"
_CONTAINER_DEADLINE_S = 300
#: Fast cleaning and expiry, so that a test can observe compaction. Topics enable it in their settings. A consumer group
#: whose partitions the brokers assign notices quickly that a member has died.
BROKER_SETTINGS = {
    "log.cleaner.backoff.ms": "500",
    "log.retention.check.interval.ms": "1000",
    "group.consumer.min.session.timeout.ms": "6000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "300",
    "group.consumer.heartbeat.interval.ms": "300",
}

#: A broker that forgets an unused transactional ID and an idle producer's state after 1.5 s, and that aborts a
#: transaction soon after its timeout.
FORGETFUL_SETTINGS = {
    "transactional.id.expiration.ms": "1500",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
    "producer.id.expiration.ms": "1500",
    "producer.id.expiration.check.interval.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}

_containers: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class KafkaServer:
    """A broker for tests."""

    bootstrap_servers: str
    kind: str  # "local", "containers" or "given"

    def fresh_name(self, prefix: str = "test") -> str:
        """Return a name for a topic or a job that no other test has."""
        return f"{prefix}-{secrets.token_hex(5)}"


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """An S3 server for tests, with a bucket that exists."""

    endpoint: str
    bucket: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)
    server: str  # "versitygw", "moto" or "given"
    kind: str  # "local", "containers" or "given"

    def fresh_prefix(self, prefix: str = "test") -> str:
        """Return a key prefix that no other test has."""
        return f"{prefix}-{secrets.token_hex(5)}"

    def client(self) -> Any:
        """Return a plain boto3 client for inspecting what the server stores."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}),
        )


def kafka_server() -> KafkaServer:
    """Return the run's broker. Start it if it does not run yet."""
    if given := os.environ.get("STATEMGR_TEST_KAFKA"):
        return KafkaServer(bootstrap_servers=given, kind="given")
    return KafkaServer(**_shared("kafka", _containers_kafka if _in_containers() else _local_kafka))


def forgetful_server() -> KafkaServer:
    """Return the run's local broker that soon forgets its producers. Start it if it does not run yet."""
    return KafkaServer(**_shared("forgetful", _local_forgetful))


def s3_server() -> S3Server:
    """Return the run's S3 server. Start it if it does not run yet."""
    if os.environ.get("STATEMGR_TEST_S3_ENDPOINT"):
        server = _given_s3()
        _ensure_bucket(server)
        return server
    return S3Server(**_shared("s3", _containers_s3 if _in_containers() else _local_s3))


@dataclass(frozen=True, kw_only=True)
class CloudServer:
    """A server of a cloud's blob store for tests: its kind, and the address and bucket of a job's configuration."""

    kind: str  # "gcs" or "azure"
    bucket: str
    endpoint: str = ""
    connection_string: str = field(default="", repr=False)

    def settings(self, prefix: str = "test") -> dict[str, object]:
        """Return what a job needs for a store of its own."""
        place = f"{self.bucket}/{prefix}-{secrets.token_hex(5)}"
        if self.kind == "gcs":
            return {"blob.store.uri": f"gs://{place}", "blob.store.gcs.endpoint": self.endpoint}
        return {"blob.store.uri": f"az://{place}", "blob.store.azure.connection.string": self.connection_string}


def cloud_server(kind: str) -> CloudServer:
    """Return the run's server of a cloud. Start it if it does not run yet.

    Raises: PrerequisiteMissing if it cannot be installed.
    """
    return CloudServer(**_shared(kind, _local_gcs if kind == "gcs" else _local_azure))


def begin_run() -> None:
    """Create the workers' directory. The process that the user started calls this once per run."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{_RUN_PREFIX}*"):
        if not _owner_runs(leftover):
            _end(leftover)
    directory = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX))
    owner = {"pid": os.getpid(), "started_at": psutil.Process().create_time()}
    (directory / "owner.json").write_text(json.dumps(owner))
    os.environ[RUN_DIRECTORY_VARIABLE] = str(directory)


def end_run() -> None:
    """Stop the servers that the run started. The same process calls this at the end."""
    while _containers:
        _containers.pop().stop()
    directory = os.environ.pop(RUN_DIRECTORY_VARIABLE, None)
    if directory:
        _end(Path(directory))


def run_directory() -> Path:
    """Return the directory that all workers of this run share."""
    return Path(os.environ[RUN_DIRECTORY_VARIABLE])


def _end(directory: Path) -> None:
    for servers in ("kafka", "forgetful", "s3", "gcs", "azure"):
        down(directory / servers)
    shutil.rmtree(directory, ignore_errors=True)


def _owner_runs(directory: Path) -> bool:
    try:
        owner = json.loads((directory / "owner.json").read_text())
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started_at"]) < 1.0
    except (FileNotFoundError, NotADirectoryError):
        return time.time() - directory.stat().st_mtime < 60.0 if directory.is_dir() else True
    except (psutil.NoSuchProcess, ValueError, KeyError):
        return False


def _shared(name: str, start: Any) -> dict[str, Any]:
    path = run_directory() / f"{name}.json"
    with FileLock(path.with_suffix(".lock"), timeout=900):
        if not path.exists():
            path.write_text(json.dumps(start()))
        description: dict[str, Any] = json.loads(path.read_text())
    return description


def _in_containers() -> bool:
    kind = os.environ.get("STATEMGR_TEST_SERVERS", "local")
    if kind not in ("local", "containers"):
        raise ValueError(f"STATEMGR_TEST_SERVERS is {kind!r}: expected 'local' or 'containers'")
    if kind == "containers" and "PYTEST_XDIST_WORKER" in os.environ:
        raise ValueError("containers belong to one process: run without -n")
    return kind == "containers"


def _local_kafka() -> dict[str, Any]:
    servers = up(run_directory() / "kafka", s3=False, kafka_settings=BROKER_SETTINGS)
    return {"bootstrap_servers": servers.bootstrap_servers, "kind": "local"}


def _local_forgetful() -> dict[str, Any]:
    settings = BROKER_SETTINGS | FORGETFUL_SETTINGS
    servers = up(run_directory() / "forgetful", s3=False, kafka_settings=settings)
    return {"bootstrap_servers": servers.bootstrap_servers, "kind": "local"}


def _local_s3() -> dict[str, Any]:
    servers = up(run_directory() / "s3", kafka=False, s3_kind=os.environ.get("STATEMGR_TEST_S3_KIND"))
    return {
        "endpoint": servers.s3_endpoint,
        "bucket": servers.s3_bucket,
        "region": servers.s3_region,
        "access_key": servers.s3_access_key,
        "secret_key": servers.s3_secret_key,
        "server": servers.s3_server,
        "kind": "local",
    }


def _local_gcs() -> dict[str, Any]:
    servers = up(run_directory() / "gcs", kafka=False, s3=False, gcs=True)
    return {"kind": "gcs", "endpoint": servers.gcs_endpoint, "bucket": servers.gcs_bucket}


def _local_azure() -> dict[str, Any]:
    servers = up(run_directory() / "azure", kafka=False, s3=False, azure=True)
    return {
        "kind": "azure",
        "connection_string": servers.azure_connection_string,
        "bucket": servers.azure_container,
    }


def _containers_kafka() -> dict[str, Any]:
    from testcontainers.community.kafka import KafkaContainer

    class Broker(KafkaContainer):
        """A broker that is ready when it answers. Its log lines differ between images and loggers."""

        def configure(self) -> None:
            super().configure()
            self.wait_for = re.compile("")

    container = Broker(os.environ.get("STATEMGR_TEST_KAFKA_IMAGE", _CP_KAFKA_IMAGE)).with_kraft()
    settings = BROKER_SETTINGS | {
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "auto.create.topics.enable": "false",
    }
    for name, value in settings.items():
        container.with_env("KAFKA_" + name.upper().replace(".", "_"), value)
    _containers.append(container)
    container.start(timeout=_CONTAINER_DEADLINE_S)
    _wait_for_broker(container.get_bootstrap_server())
    return {"bootstrap_servers": container.get_bootstrap_server(), "kind": "containers"}


def _wait_for_broker(bootstrap_servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    end = time.monotonic() + _CONTAINER_DEADLINE_S
    while True:
        try:
            admin.list_topics(timeout=2.0)
            return
        except KafkaException:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _containers_s3() -> dict[str, Any]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import PortWaitStrategy

    access_key, secret_key = "test" + secrets.token_hex(8), secrets.token_hex(20)
    container = (
        DockerContainer(os.environ.get("STATEMGR_TEST_S3_IMAGE", _VERSITYGW_IMAGE))
        .with_env("ROOT_ACCESS_KEY", access_key)
        .with_env("ROOT_SECRET_KEY", secret_key)
        .with_command("--port :7070 --quiet --keep-alive posix /tmp/vgw")
        .with_exposed_ports(7070)
        .waiting_for(PortWaitStrategy(7070).with_startup_timeout(_CONTAINER_DEADLINE_S))
    )
    container.start()
    _containers.append(container)
    server = S3Server(
        endpoint=f"http://{container.get_container_host_ip()}:{container.get_exposed_port(7070)}",
        bucket="statemgr",
        region="us-east-1",
        access_key=access_key,
        secret_key=secret_key,
        server="versitygw",
        kind="containers",
    )
    _ensure_bucket(server)
    return asdict(server)


def _given_s3() -> S3Server:
    environment = os.environ
    return S3Server(
        endpoint=environment["STATEMGR_TEST_S3_ENDPOINT"],
        bucket=environment.get("STATEMGR_TEST_S3_BUCKET", "statemgr-test"),
        region=environment.get("STATEMGR_TEST_S3_REGION", "us-east-1"),
        access_key=environment["STATEMGR_TEST_S3_ACCESS_KEY"],
        secret_key=environment["STATEMGR_TEST_S3_SECRET_KEY"],
        server="given",
        kind="given",
    )


def _ensure_bucket(server: S3Server) -> None:
    from botocore.exceptions import ClientError

    client = server.client()
    try:
        client.head_bucket(Bucket=server.bucket)
    except ClientError:
        client.create_bucket(Bucket=server.bucket)
    finally:
        client.close()
