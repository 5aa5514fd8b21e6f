"""A rescale that kills itself with SIGKILL at a chosen step: ``python -m tests.crash.rescale_child '{…}'``.

Input is a JSON object: ``arguments`` of the command line, ``phase`` and ``number`` (die when this step is announced for
the n-th time).
"""

from __future__ import annotations

import json
import sys

from statemgr.cli.main import cli
from statemgr.phases import Phase
from tests.crash.child import die_at

if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    die_at(Phase(order["phase"]), order["number"])
    cli.main(order["arguments"])
