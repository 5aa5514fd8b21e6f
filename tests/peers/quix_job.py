"""A Quix Streams job, which a test runs with a Python that has it: ``quix_job.py BROKER GROUP TOPIC KIND COUNT``.

The job counts rows by key, deletes a key at a row ``0``, and ends after COUNT rows. Kinds: ``plain``; ``ttl`` (a key's
state lives for a day); ``exactly-once``; ``crash`` (die after the changes are in the changelog and before the offsets
are committed); ``window`` (count in windows).
"""

import os
import sys
import tempfile
from datetime import timedelta

from quixstreams import Application, State
from quixstreams.internal_consumer import InternalConsumer

BROKER, GROUP, TOPIC, KIND, COUNT = sys.argv[1:6]


def total(row: int, state: State) -> int:
    """Count a key's rows, or delete its state at a row 0."""
    ttl = timedelta(days=1) if KIND == "ttl" else None
    if row == 0:
        state.delete("rows")
        return 0
    number = (state.get("rows") or 0) + 1
    if ttl is None:
        state.set("rows", number)
        state.set_bytes("last", b"row %d" % row)
    else:
        state.set("rows", number, ttl=ttl)
        state.set_bytes("last", b"row %d" % row, ttl=ttl)
    return number


def crash(*_: object, **__: object) -> None:
    """Die instead of committing the offsets."""
    os._exit(9)


if KIND == "crash":
    InternalConsumer.commit = crash
app = Application(
    broker_address=BROKER,
    consumer_group=GROUP,
    auto_offset_reset="earliest",
    state_dir=tempfile.mkdtemp(),
    commit_interval=3600,
    processing_guarantee="exactly-once" if KIND == "exactly-once" else "at-least-once",
    consumer_extra_config={"session.timeout.ms": 6000, "heartbeat.interval.ms": 2000},
    loglevel="WARNING",
)
frame = app.dataframe(app.topic(TOPIC, key_deserializer="bytes", value_deserializer="integer"))
if KIND == "window":
    frame.tumbling_window(timedelta(seconds=10)).count().current()
else:
    frame.apply(total, stateful=True)
app.run(count=int(COUNT), timeout=60)
