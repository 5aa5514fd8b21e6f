"""Brokers whose clients come through proxies, and clusters of three of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.process import free_port
from tests.clusters.proxies import TcpProxy
from tests.kafka_jobs import wait_until
from tests.servers import BROKER_SETTINGS, KafkaServer

#: Names of the listeners of a broker: each group of clients has one, with proxies of its own.
PEERS = "PEERS"


@dataclass(kw_only=True)
class ProxiedBroker(KafkaBroker):
    """A broker with a direct address (``bootstrap_servers``), and one behind a proxy for each name of ``sides``.

    In a cluster, ``PEERS`` is the side of the other brokers.
    """

    node: int = 1
    sides: Sequence[str] = ()
    more: dict[str, str] = field(default_factory=dict)
    proxies: dict[str, TcpProxy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        behind = {side: free_port() for side in self.sides}
        self.proxies = {side: TcpProxy(port, free_port()) for side, port in behind.items()}
        own = {"PLAINTEXT": self.port, "CONTROLLER": self.controller_port, **behind}
        advertised = {"PLAINTEXT": self.port} | {side: proxy.port for side, proxy in self.proxies.items()}
        self.settings = {
            **BROKER_SETTINGS,
            "node.id": str(self.node),
            "listeners": _addresses(own),
            "advertised.listeners": _addresses(advertised),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in own),
            "inter.broker.listener.name": PEERS if PEERS in self.sides else "PLAINTEXT",
            **self.more,
        }

    def answers(self) -> bool:
        """Return whether the broker answers at its direct address, and is not fenced by the controller."""
        client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            return self.node in client.list_topics(timeout=2.0).brokers
        except KafkaException:
            return False


def _addresses(ports: dict[str, int]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())


@dataclass
class Cluster:
    """Three brokers, each of which is a controller, too. ``sides`` name groups of clients, each behind its proxies."""

    brokers: list[ProxiedBroker]

    def server(self, side: str | None = None) -> KafkaServer:
        """Return the cluster as the clients of a side see it; None: without proxies."""
        ports = [broker.proxies[side].port if side else broker.port for broker in self.brokers]
        return KafkaServer(bootstrap_servers=",".join(f"127.0.0.1:{port}" for port in ports), kind="local")

    def proxies(self, side: str) -> list[TcpProxy]:
        """Return the proxies of a side, one for each broker."""
        return [broker.proxies[side] for broker in self.brokers]

    def admin(self) -> AdminClient:
        """Return a client of all brokers. Keep it until its answers have arrived."""
        return AdminClient({"bootstrap.servers": self.server().bootstrap_servers, "log_level": 0})

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the node that leads a partition, or -1."""
        return int(self.admin().list_topics(topic, timeout=60).topics[topic].partitions[partition].leader)

    def in_sync(self, topic: str) -> int:
        """Return the smallest number of replicas in sync of the partitions of a topic."""
        found = self.admin().list_topics(topic, timeout=60).topics[topic].partitions.values()
        return min(len(partition.isrs) for partition in found)

    def settled(self, *topics: str) -> None:
        """Wait until each partition of the topics has all of its replicas in sync."""
        wait_until(lambda: all(self.in_sync(topic) == len(self.brokers) for topic in topics))


@contextmanager
def running_cluster(directory: Path, sides: Sequence[str] = (), **more: str) -> Iterator[Cluster]:
    """Run three brokers with three replicas of everything. ``more`` are properties of each (``__`` for ``.``)."""
    cluster_id = secrets.token_urlsafe(16).replace("-", "A")
    controllers = [free_port() for _ in range(3)]
    settings = {
        "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{port}" for node, port in enumerate(controllers, 1)),
        "default.replication.factor": "3",
        "min.insync.replicas": "2",
        "offsets.topic.replication.factor": "3",
        "transaction.state.log.replication.factor": "3",
        "transaction.state.log.min.isr": "2",
        "replica.lag.time.max.ms": "3000",
        "controller.quorum.election.timeout.ms": "1000",
        "controller.quorum.fetch.timeout.ms": "2000",
        "controlled.shutdown.enable": "true",
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    brokers = [
        _OfCluster(
            directory=directory / f"broker-{node}",
            node=node,
            controller_port=port,
            sides=[PEERS, *sides],
            more=settings,
            cluster_id=cluster_id,
        )
        for node, port in enumerate(controllers, 1)
    ]
    with ExitStack() as stack:
        for broker in brokers:
            for proxy in broker.proxies.values():
                stack.enter_context(proxy)
            stack.callback(broker.delete)
        for broker in brokers:
            broker.process = broker.spawn()  # a controller alone has no quorum
        for broker in brokers:
            broker.start()
        yield Cluster(list(brokers))


@dataclass(kw_only=True)
class _OfCluster(ProxiedBroker):
    cluster_id: str

    def new_cluster_id(self) -> str:
        """Return the ID that the brokers share."""
        return self.cluster_id
