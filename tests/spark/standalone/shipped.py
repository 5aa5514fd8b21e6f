"""What the query of the cluster uses, and what only ``--py-files`` brings to the executors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

OUTPUT = "customer string, total bigint, python string"


class Totals(StatefulProcessor):
    """Adds up the amounts of a customer."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "total bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        total = (self.total.get()[0] if self.total.exists() else 0) + sum(row.amount for row in rows)
        self.total.update((total,))
        yield Row(customer=key[0], total=total, python=sys.prefix)


def add_up(batches: Iterator[pa.RecordBatch], stores: Mapping[str, Any], context: Any) -> Iterator[pa.RecordBatch]:
    """The same with a store."""
    store = stores["totals"]
    for batch in batches:
        sums: Counter[str] = Counter()
        for customer, amount in zip(batch["customer"].to_pylist(), batch["amount"].to_pylist(), strict=True):
            sums[customer] += amount
        saved = store.get_many([name.encode() for name in sums])
        totals = [int(old or b"0") + sums[name] for name, old in zip(sums, saved, strict=True)]
        store.put_many([(name.encode(), b"%d" % total) for name, total in zip(sums, totals, strict=True)])
        yield pa.RecordBatch.from_pydict({"customer": [*sums], "total": totals, "python": [sys.prefix] * len(sums)})
