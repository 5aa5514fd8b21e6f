"""Kafka adapters (floor 2): checkpoint topic, changelog topics, transactional publisher, topic settings."""
