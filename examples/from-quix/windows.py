"""A job of Quix Streams that counts rows by key and hour, and stops.

``windows.py BROKER GROUP TOPIC ROWS DIRECTORY``.
"""

import sys
from datetime import timedelta

from quixstreams import Application
from quixstreams.dataframe.windows import Count

broker, group, topic, rows, directory = sys.argv[1:]

app = Application(broker_address=broker, consumer_group=group, auto_offset_reset="earliest", state_dir=directory)
frame = app.dataframe(app.topic(topic, key_deserializer="str", value_deserializer="bytes"))
frame.tumbling_window(timedelta(hours=1)).agg(rows=Count()).current()
app.run(count=int(rows), timeout=60)
