"""A worker of Spark that ends with its task closes its attempt before it returns."""

from __future__ import annotations

import pytest

from spark_integration.attempt import ends_with_its_task


@pytest.mark.parametrize(
    ("environ", "ends"),
    [
        (("SPARK_REUSE_WORKER", "PYTHON_WORKER_FACTORY_SECRET"), False),
        (("SPARK_REUSE_WORKER", "PYTHON_WORKER_FACTORY_SOCK_DIR"), False),
        (("PYTHON_WORKER_FACTORY_SECRET",), True),
        (("SPARK_REUSE_WORKER", "PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SECRET"), True),
        (("SPARK_REUSE_WORKER", "PYTHON_WORKER_FACTORY_SOCK_PATH"), True),
    ],
)
def test_workers_that_are_not_reused(environ: tuple[str, ...], ends: bool) -> None:
    """The variables are those of Spark 4.2 with and without its daemon, with sockets and with ports."""
    assert ends_with_its_task(dict.fromkeys(environ, "1")) is ends
