"""A process that materializes one task and kills itself: ``materialize_child.py POINT NUMBER CONFIG``.

POINT is a phase, or ``replay`` or ``upload`` for progress reports of these steps. The process dies at occurrence
NUMBER.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from statemgr import JobConfig
from statemgr.backends.blobs import snapshots
from statemgr.kafka import reader
from statemgr.operations.materialize import build
from statemgr.operations.materialize.tasks import materialize_task
from statemgr.phases import Phase, add_observer

POINT, NUMBER = sys.argv[1], int(sys.argv[2])
seen = 0


def count(point: str) -> None:
    """Kill this process at the chosen occurrence of the point."""
    global seen
    seen += point == POINT
    if seen == NUMBER:
        os.kill(os.getpid(), signal.SIGKILL)


def observe(phase: Phase, subject: str) -> None:
    """Count an announced phase."""
    count(phase.value)


def progress(what: str, done: int, total: int) -> None:
    """Count a progress report, which the command would show to a person."""
    count(what.rpartition(" ")[2])


build.NOTE_S = 0.0
snapshots._GROUP_BYTES = 1
reader._BATCH = 500
add_observer(observe)
materialize_task(JobConfig.from_mapping(json.loads(sys.argv[3])), "Partition 0", progress=progress)
