"""Committing: prepare and publish a checkpoint, then clean up; snapshots and local copies besides the commits."""
