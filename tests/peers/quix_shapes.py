"""Quix Streams jobs of many shapes, which a test runs with a Python that has it: ``quix_shapes.py DESCRIPTION``.

DESCRIPTION is JSON: ``broker``, ``group``, ``topics``, ``keys`` (the deserializer), ``shape``, ``exactly_once``, and
``count``, the number of rows after which the job ends. A row is a number: n counts for n, -n deletes the count of n.
The job prints as JSON what Quix Streams then reads from its stores: the store, the key in hexadecimal, and the value.
"""

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from quixstreams import Application, State
from quixstreams.state.rocksdb.partition import RocksDBStorePartition
from quixstreams.state.rocksdb.windowed.partition import WindowedRocksDBStorePartition

JOB = json.loads(sys.argv[1])
SHAPE = JOB["shape"]
TEN = timedelta(seconds=10)


def count(row: int, state: State) -> int:
    """Count the rows of a key, and keep whose they are."""
    number, ttl = abs(row), {"ttl": timedelta(days=1)} if SHAPE == "ttl" else {}
    state.set("of", number, **ttl)
    if row < 0:
        state.delete("rows")
    elif SHAPE == "bytes":
        state.set_bytes("rows", b"%d" % (int(state.get_bytes("rows") or b"0") + 1))
    elif SHAPE == "nested":
        state.set("rows", {"é|": [(state.get("rows") or {"é|": [0]})["é|"][0] + 1], "of": None})
    else:
        state.set("rows", (state.get("rows") or 0) + 1, **ttl)
    return number


def windows(frame):
    """Count in windows."""
    if SHAPE == "hopping":
        return frame.hopping_window(TEN, timedelta(seconds=5)).count().current()
    if SHAPE == "sliding":
        return frame.sliding_window(TEN).count().current()
    if SHAPE == "named":
        return frame.tumbling_window(TEN, name="mine").count().current()
    return frame.tumbling_window(TEN).count().current()


def content(directory: Path):
    """Yield what is in the stores."""
    for place in sorted(one.parent for one in directory.rglob("CURRENT")):
        kind = (
            WindowedRocksDBStorePartition
            if SHAPE in ("tumbling", "hopping", "sliding", "named")
            else RocksDBStorePartition
        )
        opened = kind(str(place))
        for key, value in opened.iter_items(lower_bound=b"", cf_name="default"):
            value = value[8:] if SHAPE == "ttl" else value  # without the expiry
            yield place.relative_to(directory).parts[-3:], key.hex(), value.hex()
        opened.close()


directory = tempfile.mkdtemp()
app = Application(
    broker_address=JOB["broker"],
    consumer_group=JOB["group"],
    auto_offset_reset="earliest",
    state_dir=directory,
    commit_interval=3600 if SHAPE != "group_by" else 0.2,
    processing_guarantee="exactly-once" if JOB["exactly_once"] else "at-least-once",
    consumer_extra_config={"session.timeout.ms": 6000, "heartbeat.interval.ms": 2000},
    loglevel="WARNING",
)
frames = [
    app.dataframe(app.topic(topic, key_deserializer=JOB["keys"], value_deserializer="integer"))
    for topic in JOB["topics"]
]
if SHAPE == "concat":
    frames = [frames[0].concat(frames[1])]
if SHAPE == "group_by":
    frames = [frames[0].group_by(lambda row: f"g{abs(row) % 7}", name="g", value_deserializer="json")]
for frame in frames:
    if SHAPE in ("tumbling", "hopping", "sliding", "named"):
        windows(frame)
    else:
        frame.apply(count, stateful=True)
app.run(count=JOB["count"], timeout=60)
print(json.dumps(list(content(Path(directory)))))
