"""Kafka adapters: checkpoint topic, changelog topics, transactional publisher, topic settings. All Kafka I/O is
here."""
