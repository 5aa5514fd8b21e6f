"""Tests of the code blocks in the documentation."""
