"""Doctor: check everything that a job needs, and say how to fix it. Changes nothing without ``--fix``."""

COMMANDS = {
    "doctor": ("command:command", "Check everything that the job needs, and say how to fix it."),
}
