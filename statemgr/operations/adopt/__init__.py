"""Adopt: take over the state and the input offsets of a job that other software ran, and that is stopped.

It promises that the new job begins with exactly the state that the old job had at the adopted offsets, or not at all.
It never writes to the old job's topics, unless they are adopted in place. A run that is killed has reserved the tasks
of the new job and has written to its changelogs; the next run continues, and one transaction publishes all tasks
(``adopt.py`` has the steps).
"""

COMMANDS = {
    "adopt": ("command:command", "Take over the state of a job that other software ran."),
}
