"""A command that kills itself with SIGKILL at a chosen phase: ``python -m tests.core.crash.command_child '{…}'``.

Input is a JSON object: ``arguments`` of the command line, ``phase`` and ``number`` (die at the n-th announcement of
this phase; default: the first).
"""

from __future__ import annotations

import json
import sys

from statemgr.cli.main import cli
from statemgr.phases import Phase
from tests.core.crash.child import die_at

if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    die_at(Phase(order["phase"]), order.get("number", 1))
    cli.main(order["arguments"])
