"""Top: the tasks of a job by lag and age, refreshed, with what is wrong. Reads only."""

COMMANDS = {
    "top": ("command:command", "Show the tasks by lag and age, refreshed."),
}
