"""Bytes of checkpoints, indexes, chains and prepared commits: Avro with the schemas of ``schemas/``."""
