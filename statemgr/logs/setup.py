"""Sets the log up as the configuration says, unless the application has done so."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from statemgr.logs.formats import JsonFormat, TextFormat

if TYPE_CHECKING:
    from statemgr.config import JobConfig

#: The loggers that follow ``log.level``. Others, such as the application's, keep their level.
_OURS = ("statemgr", "spark_integration")


def configure_logging(config: JobConfig) -> bool:
    """Write the log to the standard error stream in ``log.format``, with statemgr's own lines from ``log.level`` on.

    If the root logger has a handler, the application has configured logging itself, and this changes nothing.
    :meth:`statemgr.StateManager.run` and a stateful query on Spark call this. Call it first in a program whose own
    lines are to have the same format.

    Returns: whether it has set the log up.
    """
    root = logging.getLogger()
    if root.handlers:
        return False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormat(config.job_name) if config.log_format == "json" else TextFormat())
    root.addHandler(handler)
    for name in _OURS:
        logging.getLogger(name).setLevel(config.log_level.upper())
    return True
