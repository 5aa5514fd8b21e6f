"""A consumer loop that adds up the quantity of each product.

``test_totals.py`` tests it without servers. To run it, set ``blob.store.uri`` and ``state.dir`` in ``job.toml`` to
places of yours, and run ``python totals.py job.toml`` in this directory.
"""

import sys
from contextlib import closing

from confluent_kafka import Message

from statemgr import JobConfig, StateManager, Task


def process(task: Task, message: Message) -> None:
    """Add a message's value to the total of its key, and send the new total to ``totals-out``."""
    totals, product = task.store("totals"), (message.key() or b"").decode()
    total = (totals.get(product) or 0) + int(message.value() or 0)
    totals.put(product, total)
    task.produce("totals-out", message.key(), str(total).encode())


if __name__ == "__main__":
    config = JobConfig.from_file(sys.argv[1])
    with closing(config.consumer("totals")) as consumer, StateManager(config) as manager:
        manager.run(consumer, process)
