"""Migrate: move a job from one backend to another, stage by stage, and back; prove that both hold the same state.

It promises that a step is refused unless each of its preconditions was tried and met. Steps change the configuration
file, and the job takes them at its next start. The one step that writes state, the way back from stage 4, fills
changelogs by commits of the job's own state; after a kill it skips tasks that are complete.
"""

COMMANDS = {
    "migrate": ("command:command", "Move the job to another backend, step by step, and back."),
}
