"""A job of Apache Samza moves to statemgr: ``python examples/from-samza/run.py --broker localhost:9092``.

Needs Java and Maven, which fetches Samza 1.8.0.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from steps import Example, run  # noqa: E402 - it is next to the examples

example = Example("samza")
java = example.built_java(HERE, "Counts")

# 1. the old job counts the first half of the rows, commits and stops
example.send_half()
settings = (HERE / "counts.properties").read_text()
for name, value in {
    "NAME": example.name,
    "TOPIC": example.topic,
    "BROKER": example.broker,
    "DIRECTORY": str(example.work / "samza"),
    "ROWS": str(example.half),
}.items():
    settings = settings.replace(f"${name}", value)
file = example.work / "counts.properties"
file.write_text(settings)
run(*java, file)

# 2. the new job adopts its changelog and its offsets, which are in its checkpoint topic; Samza's strings are UTF-8
config = example.adopt(stores__counts__key__serde="string", stores__counts__value__serde="string")

# 3. and goes on
example.go_on(config, "counts", lambda key: key)
