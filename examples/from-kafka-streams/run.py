"""A job of Kafka Streams moves to statemgr: ``python examples/from-kafka-streams/run.py --broker localhost:9092``.

Needs Java and Maven, which fetches Kafka Streams 4.3.1.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from steps import Example, run  # noqa: E402 - it is next to the examples

example = Example("kafka-streams")
java = example.built_java(HERE, "Counts")

# 1. the old job counts the first half of the rows, and stops; its application.id is its consumer group
example.send_half()
run(*java, example.broker, example.name, example.topic, example.half, example.work / "streams")
example.await_stopped(example.name)

# 2. the new job adopts its changelog and its offsets; strings of Kafka Streams are UTF-8
config = example.adopt(stores__counts__key__serde="string", stores__counts__value__serde="string")

# 3. and goes on
example.go_on(config, "counts", lambda key: key)
