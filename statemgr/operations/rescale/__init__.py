"""Rescale: give a job more tasks or fewer, and go back.

It promises that every key is in the task that its partitioner names, with its value at the checkpoints that the new
layout begins with. The job runs while the new stores are built; it is fenced for the last changes. Until the one
transaction that publishes the new layout, nothing has changed. A run that is killed continues from the notes of its
directory (``rescale.py`` has the steps).
"""

COMMANDS = {
    "rescale": ("command:command", "Give the job more or fewer tasks, and go back."),
}
