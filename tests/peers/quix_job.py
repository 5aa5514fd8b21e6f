"""A Quix Streams job, which a test runs with a Python that has it.

``quix_job.py BROKER GROUP TOPIC KIND COUNT KEYS VIEW``: the job has rows with keys that the deserializer KEYS reads,
ends after COUNT rows, and writes to the file VIEW what Quix Streams itself reads from its stores then. Kinds:

- ``plain`` counts rows by key, and deletes a key at a row ``0``; ``ttl``: a key's state lives for a day;
  ``exactly-once``; ``crash``: the job dies after the changes are in the changelog and before the offsets are committed
- ``window`` (tumbling), ``hopping``, ``sliding`` and ``session`` count rows in windows of 10 s; ``final`` closes
  windows by key and ``partition`` by partition; ``collect`` keeps their rows
- ``count`` counts rows in windows of 100 rows
- ``timestamped`` joins the rows with the newest of the topic TOPIC-right
"""

import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from quixstreams import Application, State
from quixstreams.dataframe.windows import Collect, Count
from quixstreams.internal_consumer import InternalConsumer
from quixstreams.state.rocksdb.partition import RocksDBStorePartition
from quixstreams.state.rocksdb.windowed.partition import WindowedRocksDBStorePartition
from quixstreams.state.rocksdb.windowed.serialization import parse_window_key

BROKER, GROUP, TOPIC, KIND, COUNT, KEYS, VIEW = sys.argv[1:]
WINDOWS = ("window", "hopping", "sliding", "session", "final", "partition", "collect")


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


def add_windows(frame):
    """Count rows in windows."""
    ten, five = timedelta(seconds=10), timedelta(seconds=5)
    if KIND == "hopping":
        frame.hopping_window(ten, five).agg(value=Count()).current()
    elif KIND == "sliding":
        frame.sliding_window(ten).agg(value=Count()).current()
    elif KIND == "session":
        frame.session_window(ten).agg(value=Count()).current()
    elif KIND == "collect":
        frame.tumbling_window(ten).agg(rows=Collect()).final()
    elif KIND == "final":
        frame.tumbling_window(ten).agg(value=Count()).final()
    elif KIND == "partition":
        frame.tumbling_window(ten).agg(value=Count()).final(closing_strategy="partition")
    else:
        frame.tumbling_window(ten).count().current()


def view(directory: Path) -> list:
    """Return what Quix Streams reads from its stores: the partition, and each entry of each column family."""
    found = []
    for place in sorted(one.parent for one in directory.rglob("CURRENT")):
        opened = (WindowedRocksDBStorePartition if KIND in WINDOWS else RocksDBStorePartition)(str(place))
        for family in opened.list_column_families():
            for key, value in opened.iter_items(lower_bound=b"", cf_name=family):
                with_times = family == "__values__" or (family == "default" and KIND in (*WINDOWS, "timestamped"))
                parts = parse_window_key(key) if with_times else (key,)
                found.append([int(place.name), family, parts[0].hex(), *parts[1:], value.decode(errors="replace")])
        opened.close()
    return found


if KIND == "crash":
    InternalConsumer.commit = crash
state_dir = tempfile.mkdtemp()
app = Application(
    broker_address=BROKER,
    consumer_group=GROUP,
    auto_offset_reset="earliest",
    state_dir=state_dir,
    commit_interval=3600,
    processing_guarantee="exactly-once" if KIND == "exactly-once" else "at-least-once",
    consumer_extra_config={"session.timeout.ms": 6000, "heartbeat.interval.ms": 2000},
    loglevel="WARNING",
)
frame = app.dataframe(app.topic(TOPIC, key_deserializer=KEYS, value_deserializer="integer"))
if KIND in WINDOWS:
    add_windows(frame)
elif KIND == "count":
    frame.tumbling_count_window(100).agg(value=Count()).current()
elif KIND == "timestamped":
    right = app.dataframe(app.topic(f"{TOPIC}-right", key_deserializer=KEYS, value_deserializer="integer"))
    right = right.apply(lambda row: {"right": row})
    frame.apply(lambda row: {"left": row}).join_asof(right, how="left", grace_ms=timedelta(days=1))
else:
    frame.apply(total, stateful=True)
if KIND in ("hopping", "final", "partition", "collect", "timestamped"):
    app.run(timeout=10)  # Quix Streams counts results, and there is not one for each row
else:
    app.run(count=int(COUNT), timeout=60)
if VIEW:
    Path(VIEW).write_text(json.dumps(view(Path(state_dir))))
