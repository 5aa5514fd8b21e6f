"""Counts the orders of each customer and adds up their amounts: ``python service.py``.

Stop it with Ctrl-C, or kill it: the next start continues where the last commit was. Start it several times, and the
processes share the partitions.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from statemgr import JobConfig, StateManager, StatemgrError, Task, configure_logging

if TYPE_CHECKING:
    from confluent_kafka import Message


def process(task: Task, message: Message) -> None:
    """Add one order to the totals of its customer: the key is the customer, and the value is the order as JSON."""
    key, value = message.key(), message.value()
    if key is None or value is None:
        return
    totals, customer, order = task.store("totals"), key.decode(), json.loads(value)
    total = totals.get(customer) or {"orders": 0, "amount": 0}
    totals.put(customer, {"orders": total["orders"] + 1, "amount": total["amount"] + order["amount"]})


def main() -> None:
    """Run until SIGTERM or Ctrl-C."""
    config = JobConfig.from_file("job.toml")
    configure_logging(config)  # to the standard error stream, as log.format and log.level say
    consumer = config.consumer(config.job_name)
    try:
        with StateManager(config) as manager:
            manager.run(consumer, process)
    except StatemgrError as error:
        sys.exit(str(error))
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
