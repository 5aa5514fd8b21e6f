"""Measurements of a rescale that run in their own process. Each function takes and returns JSON."""

from __future__ import annotations

import time
from typing import Any

from statemgr.config import JobConfig
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.operations.migrate.verify import hash_parts
from statemgr.operations.rescale.plan import plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.ports import no_progress
from statemgr.wiring import WorkerProcesses, open_services
from statemgr_tools.bench.memory import let_go

_PROCESSES = 2


def rescale_job(config: dict[str, Any], tasks: int, held: str) -> dict[str, Any]:
    """Rescale a job on two processes, as ``statemgr rescale`` does. The start of the processes does not count."""
    parsed = JobConfig.from_mapping(config)
    log = CheckpointTopic(parsed, SystemClock(), owned=True)
    plan = plan_rescale(parsed, log.read(), tasks, None)
    services = open_services(plan.config)
    with WorkerProcesses(plan.config, _PROCESSES) as workers:
        for started in [workers.submit(hash_parts, ()) for _ in range(_PROCESSES)]:
            started.result()
        let_go(held)
        start = time.perf_counter()
        everything = Workers(workers.submit, _PROCESSES, open_services)
        done = rescale(services, log, tasks, everything, no_progress, chosen="murmur2")
        took = time.perf_counter() - start
    log.close()
    services.close()
    return {"seconds": took, "keys": done.built.keys}
