"""Spark data sources that read what a job has published: its state, its checkpoints, and the changes between two."""
