"""The state backend that keeps every change in a compacted Kafka topic."""
