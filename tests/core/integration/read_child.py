"""A process that reads checkpoint topics: ``python -m tests.core.integration.read_child``.

Input is a JSON object: ``whole`` is the configuration of a job whose topic is undamaged, ``damaged`` is a list of
others. For each of these it prints a line: whether the read gave the same, or the place of the error.
"""

from __future__ import annotations

import json
import sys

from statemgr import JobConfig
from statemgr.errors import CorruptRecord
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock


def main() -> None:
    """Read all topics, one after the other."""
    order = json.load(sys.stdin)
    expected = CheckpointTopic(JobConfig.from_mapping(order["whole"]), SystemClock()).read()
    for mapping in order["damaged"]:
        answer: dict[str, object]
        try:
            found = CheckpointTopic(JobConfig.from_mapping(mapping), SystemClock(), stall_s=3).read()
            answer = {"same": found == expected}
        except CorruptRecord as error:
            answer = {"where": dict(error.where)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
