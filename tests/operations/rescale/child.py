"""A rescale that kills itself with SIGKILL at a chosen phase: ``python -m tests.operations.rescale.child '{…}'``.

Input is a JSON object: ``arguments`` of the command line, ``phase`` and ``number`` (die at the n-th announcement of
this phase). With ``config`` (a file) and ``tasks`` instead of ``arguments``, other processes build the new stores. They
run this module with ``unit``, read their order from standard input and outlive the driver.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.operations.rescale.spread import rescale_job, rescale_unit
from statemgr.phases import Phase
from tests.core.crash.child import die_at


def in_a_process(order: str) -> str:
    """Carry out an order in another process."""
    command = [sys.executable, "-m", "tests.operations.rescale.child", "unit"]
    return subprocess.run(command, input=order, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    if sys.argv[1] == "unit":
        print(rescale_unit(sys.stdin.read()))
        sys.exit()
    order = json.loads(sys.argv[1])
    if "phase" in order:
        die_at(Phase(order["phase"]), order["number"])
    if "tasks" in order:
        rescale_job(JobConfig.from_file(Path(order["config"])), order["tasks"], in_a_process, parallel=2)
    else:
        cli.main(order["arguments"])
