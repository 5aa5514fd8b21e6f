"""Flows: open, restore, commit, publish, clean up and the background work. Each module reads as its numbered steps."""
