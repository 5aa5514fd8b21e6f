"""One complete example of every record, as bytes and as what they mean."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgpack
import zstandard

from statemgr import JobConfig
from statemgr.model import codecs
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.model.jobs.adopted_job import AdoptedJob, decode_adopted_job
from statemgr.model.jobs.layouts import RetiredLayout, decode_retired_layout
from statemgr.model.jobs.offers import Offer, OfferKey, decode_offer, encode_offer
from statemgr.model.jobs.permissions import Permissions, Permit, decode_permit
from statemgr.model.segment import encode_segment, read_segment
from statemgr.operations.copy import exported
from tests import model_samples as sample

_PLACE = codecs.Place("topic", 0, 7)
#: Kind → reads a key and a value.
READERS: dict[str, Callable[[bytes, bytes], object]] = {
    "key": lambda key, _: codecs.decode_key(key, _PLACE),
    "task record": lambda key, value: codecs.decode_task(key, codecs.decode_key(key, _PLACE), value, _PLACE),
    "record version 1": lambda key, value: codecs.decode_record_v1(codecs.decode_key(key, _PLACE), value, _PLACE),
    "checkpoint": lambda _, value: codecs.decode_checkpoint(value),
    "index": lambda _, value: codecs.decode_index(value),
    "chain": lambda _, value: codecs.decode_chain(value),
    "prepared": lambda _, value: codecs.decode_prepared(value),
    "segment": lambda _, value: [*read_segment(io.BytesIO(value))],
    "offer": lambda key, value: decode_offer(key, value, _PLACE),
    "permit": lambda key, value: decode_permit(key, value, _PLACE),
    "retired layout": lambda key, value: decode_retired_layout(key, value, _PLACE),
    "adopted job": lambda key, value: decode_adopted_job(key, value, _PLACE),
    "export": lambda _, value: exported.decode_export(value, "orders", "1"),
}


def write_records(file: Path) -> None:
    """Write the examples."""
    found = {kind: [key, value, plain(READERS[kind](key, value))] for kind, (key, value) in _written().items()}
    file.write_bytes(zstandard.compress(msgpack.packb(found), 19))


def read_records(file: Path) -> Mapping[str, tuple[bytes, bytes, Any]]:
    """Kind → key, value and what they meant."""
    found: Mapping[str, tuple[bytes, bytes, Any]] = msgpack.unpackb(zstandard.decompress(file.read_bytes()))
    return found


def plain(value: Any) -> Any:
    """Objects as mappings of their fields, and sequences as lists, for msgpack."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, bytes | str | int | float | None) else str(value)


def _written() -> dict[str, tuple[bytes, bytes]]:
    ((task_key, task_value),) = codecs.encode_record(sample.RECORD)
    old_key = codecs.encode_key(sample.RECORD.key_v1())
    layout = RetiredLayout("orders", "1", sample.LAYOUT, 1_700_000_000_000)
    permit = Permit("orders", "1", sample.TASK, "token", Permissions(allow_empty_start=True), 1_700_000_000_000)
    offer = Offer(
        sample.CHECKPOINT.checkpoint_id, "1700-ab-totals", sample.INDEX_BLOB,
        ChangelogMarker("orders-1-totals-changelog", "Zm9v", 0, 99), 1_700_000_000_000, 1_700_086_400_000,
    )  # fmt: skip
    adopted = AdoptedJob(
        "kafka-streams", "old", "group", None, True, {"totals": "old-totals-changelog"}, ("seen",), {"orders-0": 3},
        {"orders-0": 5}, {"old-totals-changelog-0": 9},
    )  # fmt: skip
    config = JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": "localhost:9092"})
    return {
        "key": (task_key, b""),
        "task record": (task_key, task_value),
        "record version 1": (old_key, codecs.encode_record_v1(sample.RECORD)),
        "checkpoint": (b"", codecs.encode_checkpoint(sample.CHECKPOINT)),
        "index": (b"", codecs.encode_index(sample.INDEX)),
        "chain": (b"", codecs.encode_chain(sample.CHAIN)),
        "prepared": (b"", codecs.encode_prepared(sample.PREPARED)),
        "segment": (b"", encode_segment([(b"k%d" % n, b"v" * n if n % 3 else None) for n in range(50)])),
        "offer": encode_offer(OfferKey("orders", "1", 0, sample.TASK, "totals", "1700-ab"), offer),
        "permit": (permit.key, permit.value),
        "retired layout": (layout.key, layout.value),
        "adopted job": adopted.encoded("orders", "1"),
        "export": (b"", b"".join(exported.export(config, {sample.TASK: sample.RECORD}, 1_700_000_000_000))),
    }
