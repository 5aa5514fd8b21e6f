"""A job of Quix Streams moves to statemgr: ``python examples/from-quix/run.py --broker localhost:9092``.

Quix Streams 3.28.1 is installed in a virtual environment of its own.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from steps import Example, run  # noqa: E402 - it is next to the examples

example = Example("quix")
python = example.built_python("quixstreams==3.28.1")

# 1. the old job counts the first half of the rows, commits and stops
example.send_half()
run(python, HERE / "counts.py", example.broker, example.name, example.topic, example.half, example.work / "quix")
example.await_stopped(example.name)

# 2. the new job adopts its changelog and its offsets. The store takes the name of its topic, a key is
#    <message key>|<state key> with the state key in JSON, and a value is JSON
store = example.topic
config = example.adopt(**{f"stores.{store}.key.serde": "string", f"stores.{store}.value.serde": "json"})

# 3. and goes on
example.go_on(config, store, lambda key: f'{key}|"rows"')
