"""A one-node Kafka broker in KRaft mode, as a child process on this machine.

Writes only in the broker's directory: ``server.properties``, ``data/``, ``broker.log``.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from statemgr.errors import UnavailableError
from statemgr.terminal.find_java import find_java
from statemgr_tools.dev.jars import broker_jars
from statemgr_tools.dev.process import Server, ServerProcess, accepts_connections, free_port, spawn

_HEAP = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

_LOGGING = {
    "defaultLogLevel": "warn",
    "log.kafka.server.KafkaRaftServer": "info",
    "showDateTime": "true",
    "dateTimeFormat": "yyyy-MM-dd HH:mm:ss.SSS",
}


@dataclass(kw_only=True)
class KafkaBroker(Server):
    """A broker. Its first start formats the data directory.

    Args:
        settings: broker properties that override the defaults (``{"log.cleaner.backoff.ms": "500"}``).
    """

    name = "the Kafka broker"
    ready_deadline_s = 60.0
    grace_s = 15.0

    controller_port: int = field(default_factory=free_port)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` for clients."""
        return f"127.0.0.1:{self.port}"

    def spawn(self) -> ServerProcess:
        java = str(find_java().program)
        self.directory.mkdir(parents=True, exist_ok=True)
        classpath = ":".join(str(jar) for jar in broker_jars())
        logging = [f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in _LOGGING.items()]
        run = [java, *_HEAP, *logging, "-cp", classpath]
        properties = self._write_properties()
        if not (self.directory / "data" / "meta.properties").exists():
            self._format([*run, "kafka.tools.StorageTool", "format", "--cluster-id"], properties)
        return spawn([*run, "kafka.Kafka", str(properties)], log=self.directory / "broker.log")

    def kill(self) -> None:
        """End the broker as a crash would."""
        if self.process is not None:
            self.process.kill()

    def restart(self) -> None:
        """Stop and start the broker with the same port and data."""
        self.stop()
        self.start()

    def delete(self) -> None:
        """Stop the broker and remove its directory."""
        self.stop(2.0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def answers(self) -> bool:
        """Return whether the broker answers a metadata request and lists itself."""
        # librdkafka backs off after a refused connection, so try the port first
        if not accepts_connections(self.port):
            return False
        client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            return any(broker.port == self.port for broker in client.list_topics(timeout=2.0).brokers.values())
        except KafkaException:
            return False

    def new_cluster_id(self) -> str:
        """Return the ID of the cluster for which an empty data directory is formatted."""
        return secrets.token_urlsafe(16).replace("-", "A")

    def _format(self, command: list[str], properties: Path) -> None:
        try:
            run = subprocess.run(
                [*command, self.new_cluster_id(), "--config", str(properties)],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"the Kafka broker's data directory was not formatted within {error.timeout:.0f} s",
                hint="this machine is very busy: try again",
                directory=str(self.directory),
            ) from error
        if run.returncode != 0:
            lines = (run.stderr or run.stdout).strip().splitlines()
            raise UnavailableError(
                "the Kafka broker's data directory could not be formatted",
                hint=lines[-1][:300] if lines else None,
                directory=str(self.directory),
            )

    def _write_properties(self) -> Path:
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self.controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str((self.directory / "data").absolute()),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # after a kill, the controller waits this long before it accepts the same broker again
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
            **self.settings,
        }
        path = self.directory / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        return path
