"""Topics: create, check and repair the topics of a job, and permit what could lose state.

``create`` and ``repair`` promise never to write into a topic that has what somebody may need. Permissions are records
of the checkpoint topic that the next opening uses up.
"""

COMMANDS = {
    "permit": ("permit_command:command", "Give the next opening a permission for something that could lose state."),
    "topics": ("command:command", "Create, check or repair the topics of the job."),
}
