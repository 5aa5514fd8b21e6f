"""Checkpoints: list and show them, keep one, and go back to one.

A rollback promises that the tasks have exactly the state and the input offsets of the checkpoint. It fences the
owners, and publishes all tasks of the job in one transaction; a run that is killed before it has changed nothing
(``owner.py`` has the steps).
"""

COMMANDS = {
    "checkpoints": ("checkpoints:command", "List and show checkpoints, and go back to one."),
}
