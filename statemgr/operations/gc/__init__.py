"""Garbage collection: find the blobs that no checkpoint needs, and delete them.

It promises never to delete a blob that a retained or kept checkpoint, an offer or a running upload may need. It
fences nobody, and may be killed at any time: what is left is garbage as before (``gc.py`` has the steps).
"""

COMMANDS = {
    "gc": ("command:command", "Find the blobs that no checkpoint needs, and delete them."),
}
