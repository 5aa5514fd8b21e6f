"""A schema registry: its client, its answers, and the schemas that it has."""
