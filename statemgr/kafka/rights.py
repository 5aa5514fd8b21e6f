"""Names the missing right when brokers refuse a request, in the words of Kafka's ACLs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import KafkaError

#: The beginning of what the caller was doing → the ACL operation that it needs on a topic.
_ON_TOPIC = {
    "creating": "Create",
    "deleting": "Delete",
    "reading topics' settings": "DescribeConfigs",
    "reading": "Read",
    "consuming": "Read",
    "publishing": "Write",
    "sending": "Write",
    "beginning": "Write",
    "settling": "Write",
}
#: Operations that Read and Write include.
_DESCRIBE = "Describe (or Read or Write)"


def missing_right(error: KafkaError, doing: str, where: Mapping[str, object], group: str | None) -> str | None:
    """``Read on topic orders-1-totals-changelog``, or None if the credentials themselves are refused.

    Args:
        doing: as in :func:`statemgr.kafka.clients.translate`.
        where: names of things; the topic and the transactional ID count.
        group: the client's consumer group, if it is a consumer.
    """
    match error.code():
        case KafkaError.TOPIC_AUTHORIZATION_FAILED:
            operation = next((needed for begin, needed in _ON_TOPIC.items() if doing.startswith(begin)), _DESCRIBE)
            return f"{operation} on topic {where.get('topic', 'unknown')}"
        case KafkaError.CLUSTER_AUTHORIZATION_FAILED if doing.startswith("creating"):
            return f"Create on topic {where.get('topic', 'unknown')}"
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            operation = "Read" if doing.startswith("consuming") else "Describe (or Read)"
            return f"{operation} on group {group or 'unknown'}"
        case KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return f"Write on transactional ID {where.get('transactional_id', 'unknown')}"
        case KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            return "ClusterAction or IdempotentWrite on the cluster"
    return None
