"""The state backends that keep snapshots and segments of changes in a blob store."""
