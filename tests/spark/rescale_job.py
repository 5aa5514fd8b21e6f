"""A rescale on executors in their own processes, for ``test_rescaling``: ``rescale_job '{…}'``.

Input is a JSON object: ``config`` (a JSON file), ``tasks``, ``scratch`` (a directory), and optionally ``phase``: the
driver kills itself with SIGKILL when this phase is announced. Unless ``scratch`` contains ``died``, the first worker
that uploads kills its executor.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from spark_integration import rescale, rescaling
from statemgr import JobConfig
from statemgr.operations.rescale.spread import rescale_unit
from statemgr.phases import Phase, observed
from tests.core.crash.child import die_at


def with_its_executor(died: str, order: str) -> str:
    """Carry out an order. The first worker that uploads kills the executor that started it."""

    def observe(announced: Phase, _: str) -> None:
        if announced is Phase.UPLOAD:
            try:
                Path(died).touch(exist_ok=False)
            except FileExistsError:
                return
            daemon = Path(f"/proc/{os.getppid()}/status").read_text()
            os.kill(int(daemon.split("PPid:")[1].split()[0]), signal.SIGKILL)

    with observed(observe):
        return rescale_unit(order)


def main(told: str) -> None:
    """Rescale, and print the new configuration and the number of orders as JSON."""
    order = json.loads(told)
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", order["scratch"])
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .config("spark.executor.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    orders: list[str] = []
    sent = rescaling._sent

    def counted(session: SparkSession, one: str) -> str:
        orders.append(one)
        return sent(session, one)

    rescaling._sent = counted
    rescaling.rescale_unit = partial(with_its_executor, str(Path(order["scratch"]) / "died"))
    if "phase" in order:
        die_at(Phase(order["phase"]), 1)
    done = rescale(spark, JobConfig.from_mapping(json.loads(Path(order["config"]).read_text())), order["tasks"])
    spark.stop()
    print(json.dumps({"config": done.config.to_mapping(), "orders": len(orders)}))


if __name__ == "__main__":
    main(sys.argv[1])
