"""A process that runs ``statemgr`` and sends itself a signal at a phase: ``adopt_child.py SIGNAL PHASE NUMBER
ARGUMENT...``.

``clean-up.remove-ttl`` counts the blobs whose TTL is about to be removed.
"""

from __future__ import annotations

import os
import signal
import sys

from statemgr.blobs.file import FileBlobStore
from statemgr.cli.main import cli
from statemgr.operations.adopt import copying as adopt_copy
from statemgr.phases import Phase, add_observer

SIGNAL, PHASE, NUMBER = signal.Signals[sys.argv[1]], Phase(sys.argv[2]), int(sys.argv[3])
seen = 0
remove_ttl = FileBlobStore.remove_ttl


def strike(phase: Phase, subject: str) -> None:
    """Signal this process at the chosen announcement."""
    global seen
    seen += phase is PHASE
    if phase is PHASE and seen == NUMBER:
        os.kill(os.getpid(), SIGNAL)


def announced(self: FileBlobStore, blob_id: str) -> None:
    """Remove a TTL as an announced step."""
    strike(Phase.REMOVE_TTL, blob_id)
    remove_ttl(self, blob_id)


adopt_copy._MOST_RECORDS = 500
FileBlobStore.remove_ttl = announced  # type: ignore[method-assign]
add_observer(strike)
cli.main(sys.argv[4:])
