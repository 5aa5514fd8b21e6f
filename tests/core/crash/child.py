"""A consumer that kills itself with SIGKILL at a chosen phase: ``python -m tests.core.crash.child '{…}'``.

Input is a JSON object: ``config`` (a mapping), ``commits`` (commit up to this input offset), ``phase`` and
``occurrence`` (die at the n-th announcement of this phase), ``ahead`` (store this many bytes before their commit, if
given).
"""

from __future__ import annotations

import json
import os
import signal
import sys

from statemgr import JobConfig, StateManager
from statemgr.backends.blobs import tables
from statemgr.flows.committing import persist_ahead
from statemgr.phases import Phase, add_observer
from tests.core.crash.model import STORES, changes


def die_at(phase: Phase, occurrence: int) -> None:
    """Kill this process at the n-th announcement of ``phase``."""
    seen = 0

    def observe(announced: Phase, subject: str) -> None:
        nonlocal seen
        if announced is phase:
            seen += 1
            if seen == occurrence:
                os.kill(os.getpid(), signal.SIGKILL)

    add_observer(observe)


def run(config: JobConfig, commits: int) -> None:
    """Continue from the last checkpoint until ``commits`` commits are published."""
    with StateManager(config) as manager:
        opened_task = manager.open_task("Partition 0")
        last = opened_task.last_checkpoint
        done = last.input_offsets["input-0"] if last else 0
        for number in range(done + 1, commits + 1):
            for store in STORES:
                opened = opened_task.store(store)
                for key, value in changes(store, number):
                    if value is None:
                        opened.delete(key)
                    else:
                        opened.put(key, value)
            opened_task.commit({"input-0": number})


def main() -> None:
    """Run the order in the first argument."""
    order = json.loads(sys.argv[1])
    if order.get("phase"):
        die_at(Phase(order["phase"]), order["occurrence"])
    if order.get("ahead"):
        persist_ahead.AHEAD_BYTES = order["ahead"]
    # The model's commits are small. This makes them tables even so where commits are segments.
    tables._FEWEST = 20
    run(JobConfig.from_mapping(order["config"]), order["commits"])


if __name__ == "__main__":
    main()
