"""Workers of commands, in this process, because the servers are in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from statemgr import JobConfig
from statemgr.operations.rescale.rescale import Workers
from statemgr.testing.memory_servers import MemoryServers


def workers(servers: MemoryServers, config: JobConfig) -> Workers:
    """Workers that do the work at once."""

    def submit(function: Callable[..., Any], *given: object) -> Future[Any]:
        done: Future[Any] = Future()
        with closing(servers.services(config)) as services:
            try:
                done.set_result(function(services, *given))
            except BaseException as error:
                done.set_exception(error)
        return done

    return Workers(submit, 1, servers.services)
