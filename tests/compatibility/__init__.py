"""Jobs and records that a release has written, and tests that each later one reads them.

``python -m tests.compatibility`` writes the corpus of the present version into a folder of its name. A corpus of a
released version is never written again.
"""
