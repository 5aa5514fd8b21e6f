"""A second broker next to a local one, so that partitions can lose their leader while the cluster keeps running."""

from __future__ import annotations

import re
from dataclasses import dataclass

from confluent_kafka.admin import AdminClient, NewTopic

from statemgr_tools.dev.kafka import KafkaBroker


@dataclass(kw_only=True)
class SecondBroker(KafkaBroker):
    """A broker of the cluster that ``first`` controls."""

    first: KafkaBroker

    def __post_init__(self) -> None:
        self.settings = {
            "process.roles": "broker",
            "node.id": "2",
            "controller.quorum.voters": f"1@127.0.0.1:{self.first.controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
        }

    def new_cluster_id(self) -> str:
        """Return the cluster ID of the first broker."""
        properties = (self.first.directory / "data" / "meta.properties").read_text()
        found = re.search(r"^cluster\.id=(.+)$", properties, re.MULTILINE)
        assert found is not None
        return found[1]

    def make_topic(self, name: str) -> None:
        """Create a topic whose only partition is on this broker alone."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        admin.create_topics([NewTopic(name, 1, replica_assignment=[[2]])])[name].result(30)
