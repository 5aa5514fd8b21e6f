"""A consumer group member in its own process: ``python -m tests.loop_child '{…}'``.

Input is a JSON object: ``config`` (a mapping), ``group``, ``topics``, ``log`` (a file that gets a line ``<topic>
<partition> <offset>`` for each processed message, and ``phase <name>`` for each announced phase), ``slow`` (seconds
that each message takes), ``slow_replay`` (seconds that each batch of a changelog takes to arrive), ``in_batches``
(process batches, and log a line ``batch <size>`` after the messages of each), ``clock_ahead`` (seconds by which the
machine's clock is ahead), ``output`` (a topic that gets a record for each message), ``dies_at`` (a phase at which the
process kills itself), ``permissions``.

The process counts messages by key in the store ``totals``. If it fails with a typed error, it prints the error as JSON
in the last line of standard output and exits with status 1.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO
from uuid import uuid4

from confluent_kafka import Message

from statemgr import JobConfig, StateManager, StatemgrError, Task, wiring
from statemgr.ids import IdSource
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.local.machine import SystemClock
from statemgr.phases import Phase, add_observer
from statemgr.ports import ChangelogBatch


def main() -> int:
    """Run until SIGTERM."""
    order = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = JobConfig.from_mapping(order["config"])
    _slow_down_replays(order.get("slow_replay", 0))
    _set_clock(order.get("clock_ahead", 0))
    with open(order["log"], "a", encoding="utf-8", buffering=1) as log:
        add_observer(lambda phase, subject: _phase(log, phase, order.get("dies_at")))

        def process(task: Task, message: Message) -> None:
            time.sleep(order.get("slow", 0))
            totals, key = task.store("totals"), message.key()
            totals.put(key, b"%d" % (int(totals.get(key) or 0) + 1))
            if "output" in order:
                task.produce(order["output"], message.value(), None)
            log.write(f"{message.topic()} {message.partition()} {message.offset()}\n")

        def process_batch(task: Task, messages: Sequence[Message]) -> None:
            for message in messages:
                process(task, message)
            log.write(f"batch {len(messages)}\n")

        functions: dict[str, Any] = (
            {"process_batch": process_batch} if order.get("in_batches") else {"process": process}
        )
        consumer = config.consumer(order["group"])
        try:
            with StateManager(config) as manager:
                manager.run(consumer, topics=order["topics"], **functions, **order.get("permissions", {}))
        except StatemgrError as error:
            print(error.to_json(), flush=True)
            return 1
        finally:
            consumer.close()
    return 0


def _slow_down_replays(seconds: float) -> None:
    changes = ChangelogTopics.changes

    def slowly(self: ChangelogTopics, *place: Any, **options: Any) -> Iterator[ChangelogBatch]:
        for batch in changes(self, *place, **options):
            time.sleep(seconds)
            yield batch

    ChangelogTopics.changes = slowly  # type: ignore[method-assign]


def _set_clock(ahead_s: float) -> None:
    time_ns = SystemClock.time_ns
    SystemClock.time_ns = lambda self: time_ns(self) + int(ahead_s * 1e9)  # type: ignore[method-assign]
    wiring.system_ids = lambda: IdSource(SystemClock().time_ns, lambda: uuid4().hex)  # type: ignore[assignment]


def _phase(log: TextIO, phase: Phase, dies_at: str | None) -> None:
    if not log.closed:
        log.write(f"phase {phase.value}\n")
    if phase.value == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
