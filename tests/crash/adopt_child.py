"""A process that runs ``statemgr`` and kills itself at a phase: ``adopt_child.py PHASE NUMBER ARGUMENT...``."""

from __future__ import annotations

import os
import signal
import sys

from statemgr.cli.main import cli
from statemgr.flows import adopt_copy
from statemgr.phases import Phase, add_observer

PHASE, NUMBER = Phase(sys.argv[1]), int(sys.argv[2])
seen = 0


def die(phase: Phase, subject: str) -> None:
    """Kill this process at the chosen announcement."""
    global seen
    seen += phase is PHASE
    if seen == NUMBER:
        os.kill(os.getpid(), signal.SIGKILL)


adopt_copy._MOST_RECORDS = 500
add_observer(die)
cli.main(sys.argv[3:])
