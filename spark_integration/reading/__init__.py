"""Spark data sources that read a job's published state, its checkpoints, and the changes between two checkpoints."""
