"""Asks Spark to run each task on the executor that ran it last, and so has its state. Spark's own state stores do the
same (``StateStoreRDD.getPreferredLocations``).

Only an RDD has preferred locations, and Python cannot make a class of Spark's JVM. So the driver's JVM compiles
``Placement.java`` with Janino, the compiler that Spark uses for its generated code.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


def placed(job: str, spread: DataFrame) -> DataFrame:
    """Return the DataFrame, whose partition i has the rows of the job's task i, with a place for each partition."""
    from pyspark.sql.dataframe import DataFrame

    session: Any = spread.sparkSession
    placement = _placement(session.sparkContext)
    if placement is None:
        return spread
    rows = placement.place(job, spread._jdf.queryExecution().toRdd())
    return DataFrame(session._jsparkSession.internalCreateDataFrame(rows, spread._jdf.schema(), False), session)


@cache
def _placement(context: Any) -> Any:
    """The application's ``Placement``; None if there is nothing to choose, because its only executor is itself."""
    # not the context's isLocal: some clusters let Python call only a list of methods
    return None if context.master == "local" or context.master.startswith("local[") else compiled(context)


def compiled(context: Any) -> Any:
    """A new ``Placement`` that listens to the application's tasks; None if its JVM does not compile it."""
    try:
        no_arguments = context._gateway.new_array(context._jvm.java.lang.Object, 0)
        placement = _constructor(context._gateway).newInstance(no_arguments)
        context._jsc.sc().addSparkListener(placement)
    except Exception as error:  # of any of Py4J's kinds
        why = " ".join(str(error).splitlines()[:2])
        log.warning("Spark chooses the executors of tasks, which may lack their state. Placing them failed: %s", why)
        return None
    return placement


@cache
def _constructor(gateway: Any) -> Any:
    """The constructor of the JVM's one class ``Placement``.

    Py4J remembers methods by the names of their classes, so it fails to call those of a second class of the same name.
    A process that stops its application and starts another keeps its JVM.
    """
    jvm = gateway.jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(resources.files(__package__).joinpath("Placement.java").read_text())
    (constructor,) = compiler.getClassLoader().loadClass("statemgr.Placement").getConstructors()
    return constructor
