"""The servers of a soak, each behind proxies, and what goes wrong with servers and networks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statemgr_tools.dev.s3 import S3Server
from tests.clusters.brokers import ProxiedBroker
from tests.clusters.proxies import TcpProxy
from tests.jobs import DUAL
from tests.servers import KafkaServer

#: Each group of clients has its own network.
SIDES = ("LOOPS", "SPARK")


@dataclass
class Servers:
    """A broker, an S3 server, and a proxy to each of them for each side."""

    directory: Path
    broker: ProxiedBroker = field(init=False)
    s3: S3Server = field(init=False)
    s3_proxies: dict[str, TcpProxy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # input and output grow with the time of the soak; the state must not
        settings = {"log.segment.bytes": str(8 * 1024 * 1024), "log.cleaner.min.compaction.lag.ms": "0"}
        self.broker = ProxiedBroker(directory=self.directory / "kafka", sides=SIDES, more=settings)
        self.s3 = S3Server(directory=self.directory / "s3")
        self.s3_proxies = {side: TcpProxy(self.s3.port) for side in SIDES}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the servers."""
        with ExitStack() as stack:
            for proxy in (*self.broker.proxies.values(), *self.s3_proxies.values()):
                stack.enter_context(proxy)
            stack.callback(self.broker.delete)
            stack.callback(self.s3.stop)
            self.broker.start()
            self.s3.start()
            yield

    def kafka(self, side: str | None = None) -> KafkaServer:
        """Return the broker as a side sees it; None: without a proxy."""
        port = self.broker.proxies[side].port if side else self.broker.port
        return KafkaServer(bootstrap_servers=f"127.0.0.1:{port}", kind="local")

    def mapping(self, side: str | None, name: str, tasks: int, directory: Path) -> dict[str, object]:
        """Return the configuration of a job of one side."""
        endpoint = f"http://127.0.0.1:{self.s3_proxies[side].port}" if side else self.s3.endpoint
        return {
            "job.name": name,
            "job.tasks": tasks,
            "kafka.bootstrap.servers": self.kafka(side).bootstrap_servers,
            "state.dir": str(directory),
            "task.backup.factories": list(DUAL),
            "task.restore.factories": list(DUAL),
            "task.commit.ms": 1000,
            "task.commit.timeout.ms": 20_000,
            "task.commit.snapshot.interval": ["20 commits"],
            "task.checkpoint.retained": 3,
            "stores.totals.value.serde": "bytes",
            "blob.store.uri": f"s3://{self.s3.bucket}/soak",
            "blob.store.s3.endpoint": endpoint,
            "blob.store.s3.region": self.s3.region,
            "blob.store.s3.path.style": True,
            "blob.store.s3.access.key": self.s3.access_key,
            "blob.store.s3.secret.key": self.s3.secret_key,
        }

    def faults(self, chance: random.Random, over: threading.Event) -> list[Callable[[], Any]]:
        """Return what can go wrong. Each function causes a fault, waits, and ends it."""

        def broker_is_killed() -> None:
            self.broker.kill()
            over.wait(chance.uniform(0, 12))
            self.broker.start()

        def broker_restarts() -> None:
            self.broker.restart()

        def broker_hangs() -> None:
            _hang(self.broker, chance.uniform(1, 25))

        def s3_is_killed() -> None:
            assert self.s3.process is not None
            self.s3.process.kill()
            over.wait(chance.uniform(0, 40))
            self.s3.start()

        def s3_hangs() -> None:
            _hang(self.s3, chance.uniform(1, 40))

        def _hang(server: ProxiedBroker | S3Server, seconds: float) -> None:
            assert server.process is not None
            server.process.suspend()
            over.wait(seconds)
            server.process.resume()

        def _network(do: Callable[[TcpProxy], None], longest: float) -> None:
            side = chance.choice(SIDES)
            proxy = chance.choice([self.broker.proxies[side], self.s3_proxies[side]])
            do(proxy)
            over.wait(chance.uniform(1, longest))
            proxy.heal()

        def network_is_cut() -> None:
            _network(TcpProxy.cut, 40)

        def network_is_cut_one_way() -> None:
            way = chance.choice(["up", "down"])
            _network(lambda proxy: proxy.cut(way), 40)  # type: ignore[arg-type]

        def network_is_slow() -> None:
            _network(lambda proxy: proxy.slow(chance.choice([2_000, 20_000, 200_000])), 40)

        def connections_are_reset() -> None:
            _network(TcpProxy.reset, 2)

        found = [broker_is_killed, broker_restarts, broker_hangs, s3_is_killed, s3_hangs]
        one_way = [network_is_cut_one_way] * 2
        return [*found, *one_way, network_is_cut, network_is_slow, connections_are_reset]
