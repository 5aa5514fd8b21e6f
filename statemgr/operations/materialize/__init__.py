"""Materialize: build the first snapshots of a running job from its changelogs, and offer them to it.

It promises that an offer is exactly the state of a checkpoint. It neither fences nor delays the job. Blobs that no
offer names expire, and a run that is killed continues from the notes of its directory (``materialize.py`` has the
steps).
"""

COMMANDS = {
    "materialize": ("command:command", "Build first snapshots from the changelogs of a running job, for it to adopt."),
}
