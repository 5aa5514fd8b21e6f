"""Other systems that the benchmark measures in the same run."""
