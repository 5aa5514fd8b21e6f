"""Standby: keep an up-to-date copy of the state of tasks, or of one store for reading, on this machine.

It promises that a copy is exactly the state of a checkpoint. It fences nobody, and publishes nothing. A copy is a
local directory as an owner makes it: if this process is killed, the next one uses it (``standby.py`` has the steps).
"""

COMMANDS = {
    "standby": ("command:command", "Keep an up-to-date copy of the state of tasks on this machine."),
}
