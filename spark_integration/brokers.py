"""Which Kafka brokers the sources and the outputs of a query name, next to those of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_integration.sessions import JvmRefused, jvm_of
from spark_integration.stateful_input import nodes
from statemgr import JobConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's option with the addresses.
BROKERS = "kafka.bootstrap.servers"


def has_own_input(rows: DataFrame, config: JobConfig) -> bool:
    """Whether all Kafka sources of an input name brokers of the job. False if there is none, or if the session does not
    let Python look at the plan."""
    try:
        with jvm_of(rows.sparkSession):
            plan = rows._jdf.queryExecution().analyzed()
            sources = [node for node in nodes(plan) if node.nodeName() == "StreamingRelationV2"]
            named = [str(servers) for one in sources if (servers := one.extraOptions().get(BROKERS))]
    except JvmRefused:
        return False
    own = str(config.kafka_client("consumer")["bootstrap.servers"])
    return bool(named) and all(are_same(servers, own) for servers in named)


def are_same(one: str, other: str) -> bool:
    """Whether one list of addresses is a part of the other."""
    first, second = _addresses(one), _addresses(other)
    return first <= second or second <= first


def _addresses(servers: str) -> set[str]:
    return {address.strip().lower() for address in servers.split(",") if address.strip()}
