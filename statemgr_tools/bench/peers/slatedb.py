"""SlateDB's Python package, if it is installed (``pip install slatedb``): a store whose files are in S3.

Each function runs in its own process, takes and returns JSON. Times are seconds of the operation.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import time
from typing import Any

from statemgr_tools.bench import records


def is_installed() -> bool:
    """Whether this Python has the package."""
    return importlib.util.find_spec("slatedb") is not None


def fill(s3: dict[str, str], name: str, count: int) -> dict[str, Any]:
    """Write ``count`` records to a new store."""
    api = _api(s3)

    async def run() -> float:
        database = await api.DbBuilder(name, _store(api, s3)).build()
        start = time.perf_counter()
        for pairs in records.batches(count, size=10_000):
            batch = api.WriteBatch()
            for key, value in pairs:
                batch.put(key, value)
            await database.write(batch)
        await database.shutdown()
        return time.perf_counter() - start

    return {"seconds": asyncio.run(run())}


def first_answer(s3: dict[str, str], name: str, of: int, seed: int) -> dict[str, Any]:
    """Open the store of ``of`` records for writing, and get the value of a random key."""
    api = _api(s3)

    async def run() -> float:
        store = _store(api, s3)
        start = time.perf_counter()
        database = await api.DbBuilder(name, store).build()
        assert await database.get(records.key(random.Random(seed).randrange(of))) is not None
        took = time.perf_counter() - start
        await database.shutdown()
        return took

    return {"seconds": asyncio.run(run())}


def _api(s3: dict[str, str]) -> Any:
    os.environ |= {
        "AWS_ENDPOINT": s3["endpoint"],
        "AWS_REGION": s3["region"],
        "AWS_ACCESS_KEY_ID": s3["access_key"],
        "AWS_SECRET_ACCESS_KEY": s3["secret_key"],
        "AWS_ALLOW_HTTP": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }
    return importlib.import_module("slatedb.uniffi")


def _store(api: Any, s3: dict[str, str]) -> Any:
    return api.ObjectStore.resolve(f"s3://{s3['bucket']}")
