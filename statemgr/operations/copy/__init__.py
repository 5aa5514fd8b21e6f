"""Copy: clone the state of a job at a checkpoint into a new job.

It promises a job with the same keys and its own blobs and changelogs. The source is only read. Copied blobs have TTLs
until the new job's first checkpoints are published, in one transaction (``copy.py`` has the steps).

``export`` writes the checkpoints of a job to a file. A copy can be made from it and the blobs when Kafka is lost.
"""

COMMANDS = {
    "copy": ("command:command", "Copy the state of the job at a checkpoint into a new job."),
    "export": ("command:export_command", "Write the job's checkpoints to a file, in case Kafka is lost."),
}
