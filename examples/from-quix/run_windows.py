"""A job with windows moves to statemgr: ``python examples/from-quix/run_windows.py --broker localhost:9092``.

Quix Streams 3.28.1 is installed in a virtual environment of its own.
"""

import sys
from pathlib import Path

from confluent_kafka import Message

from statemgr import Task
from statemgr.serdes import QuixKey

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from steps import Example, run  # noqa: E402 - it is next to the examples

HOUR_MS = 3_600_000
#: As Quix Streams calls the store of a window without a name.
STORE = f"tumbling_window_{HOUR_MS}"

example = Example("quix")
python = example.built_python("quixstreams==3.28.1")

# 1. the old job counts the first half of the rows in windows of an hour, commits and stops
example.send_half()
run(python, HERE / "windows.py", example.broker, example.name, example.topic, example.half, example.work / "quix")
example.await_stopped(example.name)

# 2. the new job adopts its windows, the newest time of each key, and its offsets. Quix Streams has read the keys of the
#    messages as text, so they are JSON in the keys of the windows; and so are the counts
config = example.adopt(**{f"stores.{STORE}.key.serde": "quix-window(json)", f"stores.{STORE}.value.serde": "json"})


def count(task: Task, row: Message) -> None:
    """One more row in the window of its key and hour, which stays open in this example."""
    windows, key, time_ms = task.store(STORE), (row.key() or b"").decode(), row.timestamp()[1]
    start = time_ms - time_ms % HOUR_MS
    window = QuixKey(key, start, start + HOUR_MS)
    before = windows.get(window) or {"rows/Count": 0}
    windows.put(window, {"rows/Count": before["rows/Count"] + 1})
    newest = QuixKey(key, -1, -1)
    windows.put(newest, max(time_ms, windows.get(newest) or 0))


# 3. and goes on in the same windows
totals: dict[str, int] = {}
for window, found in example.continued(config, STORE, count):
    if window.start_ms >= 0:  # the others are the newest times
        totals[window.key] = totals.get(window.key, 0) + found["rows/Count"]
example.check(totals, {f"key-{number}": 2 * example.each for number in range(example.keys)})
