"""The blob store in memory gives the answers of a real S3 server: both get the same calls of the adapters."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from statemgr.blobs.memory import MemoryBlobStore
from statemgr.errors import StatemgrError
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore, list_blobs
from tests.core.integration.test_s3_bucket import open_raw
from tests.servers import S3Server

_BUCKETS = count()
#: Some have to be quoted. None is a folder of another one: a server that keeps its objects as files may mix these up.
names = st.sampled_from(["a/b", "a/b.0", "ab", "a b/ü", "a/b+c", "a/B"])
bodies = st.sampled_from([b"", b"x", b"two", bytes(range(256)) * 20])
calls = st.lists(
    st.one_of(
        st.tuples(st.just("put"), names, bodies, st.sampled_from([None, 7])),
        st.tuples(st.just("get"), names, st.integers(0, 3), st.sampled_from([None, 0, 1, 2, 4000])),
        st.tuples(st.just("stat"), names),
        st.tuples(st.just("remove_ttl"), names),
        st.tuples(st.just("delete"), names),
        st.tuples(st.just("delete_many"), st.lists(names, max_size=4)),
        st.tuples(st.just("list"), st.sampled_from(["", "a", "a/", "a/b", "never"])),
    ),
    min_size=5,
    max_size=30,
)


def answer(store: BlobStore, call: tuple[Any, ...]) -> object:
    """What a caller gets: without times, which no two stores have in common."""
    what, *given_ = call
    try:
        if what == "put":
            store.put(given_[0], given_[1], ttl_days=given_[2])
            return None
        if what == "get":
            name, offset, length = given_
            offset = min(offset, store.stat(name).size)
            with store.get(name, offset, length) as reader:
                buffer, found = memoryview(bytearray(4096)), b""
                while size := reader.readinto(buffer):
                    found += buffer[:size]
                return found
        if what == "stat":
            info = store.stat(given_[0])
            return info.blob_id, info.size, info.expires_ms is None
        if what == "list":
            return sorted((info.blob_id, info.size) for info in list_blobs(store, given_[0]))
        result = getattr(store, what)(*given_)
        return result if result is None else dict(result)
    except StatemgrError as error:
        return type(error).__name__


@settings(
    max_examples=25, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(calls)
def test_both_stores_give_the_same_answers(s3: S3Server, made: list[tuple[Any, ...]]) -> None:
    """Names, bytes, ranges, lists, what is kept for ever, and the type of each error."""
    real, model = open_raw(s3, f"differential-{next(_BUCKETS)}"), MemoryBlobStore(SystemClock())
    try:
        for call in made:
            assert answer(real, call) == answer(model, call), call
    finally:
        real.close()
