"""A job of Quix Streams that counts rows by key, and stops: ``counts.py BROKER GROUP TOPIC ROWS DIRECTORY``."""

import sys

from quixstreams import Application, State

broker, group, topic, rows, directory = sys.argv[1:]


def count(row: bytes, state: State) -> None:
    """One more row of the message's key."""
    state.set("rows", state.get("rows", 0) + 1)


app = Application(broker_address=broker, consumer_group=group, auto_offset_reset="earliest", state_dir=directory)
frame = app.dataframe(app.topic(topic, key_deserializer="bytes", value_deserializer="bytes"))
frame.apply(count, stateful=True)
app.run(count=int(rows), timeout=60)
