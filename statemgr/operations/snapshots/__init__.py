"""Snapshots: show, verify and compare what the blob store has for the retained checkpoints.

Reads only, but for ``verify --repair``, which asks the owner to fill a damaged backup again.
"""

COMMANDS = {
    "snapshots": ("command:command", "List, show, verify and compare snapshots in the blob store."),
}
