"""The cases of the benchmark."""
