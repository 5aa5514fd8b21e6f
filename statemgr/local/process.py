"""This process, as the checkpoints that it publishes name it."""

from __future__ import annotations

import os
import socket

from statemgr.model.checkpoint import MOST_HOST, Owner
from statemgr.version import __version__


def this_process() -> Owner:
    """The name of this machine, the process ID, and the version of statemgr."""
    return Owner(socket.gethostname()[:MOST_HOST], os.getpid(), __version__[:MOST_HOST])
