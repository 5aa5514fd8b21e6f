"""Input offsets in Avro: for each topic its ID and the offsets of its partitions, in runs. Pure.

A thousand partitions take some bytes each, where a map of their names takes tens.
"""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.model.checkpoint_parts import Inputs
from statemgr.model.codecs.parts import Avro, each

#: Partition numbers have fewer digits than this.
_DIGITS = 10


def inputs_to_avro(inputs: Inputs) -> Avro:
    """The record ``Inputs``."""
    topics: dict[str, dict[int, int]] = {topic: {} for topic in inputs.topic_ids}
    others: dict[str, int] = {}
    for name, offset in inputs.offsets.items():
        topic, dash, number = name.rpartition("-")
        if dash and _is_number(number):
            topics.setdefault(topic, {})[int(number)] = offset
        else:
            others[name] = offset
    return {
        "topics": [
            {"topic": topic, "topic_id": inputs.topic_ids.get(topic), "runs": _runs(topics[topic])}
            for topic in sorted(topics)
        ],
        "others": each(others, int),
    }


def inputs_from_avro(value: Avro) -> Inputs:
    """Raises: ValueError for a source partition that is there twice or has a negative number."""
    offsets: dict[str, int] = {}
    ids: dict[str, str] = {}
    count = 0
    for topic in value["topics"]:
        name = topic["topic"]
        if topic["topic_id"] is not None:
            ids[name] = topic["topic_id"]
        for run in topic["runs"]:
            first, found = run["first"], run["offsets"]
            if first < 0:
                raise ValueError(f"the input topic {name!r} has the partition {first}")
            count += len(found)
            offsets.update((f"{name}-{first + n}", offset) for n, offset in enumerate(found))
    others = value["others"]
    offsets.update(others)
    if len(offsets) != count + len(others):
        raise ValueError("it names a source partition twice")
    return Inputs(offsets, ids)


def _is_number(text: str) -> bool:
    """Whether it is the plain decimal form of a partition's number, so that the name can be put together again."""
    return text.isascii() and text.isdigit() and len(text) < _DIGITS and (text == "0" or text[0] != "0")


def _runs(offsets: Mapping[int, int]) -> list[Avro]:
    runs: list[Avro] = []
    following = -1
    for partition in sorted(offsets):
        if partition != following:
            runs.append({"first": partition, "offsets": []})
        runs[-1]["offsets"].append(int(offsets[partition]))
        following = partition + 1
    return runs
