"""Keys with times: the windows of one key are one range of the store, in the order of their start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from statemgr.config.keys import WINDOW_SERDES
from statemgr.serdes import prefix_of, serde
from statemgr.serdes.windows import inner_key

_KEYS = st.binary(max_size=4) | st.lists(st.sampled_from([b"\0", b"\1", b"\xff", b"a"]), max_size=4).map(b"".join)
_TIMES = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)


@given(
    st.sampled_from(WINDOW_SERDES),
    st.tuples(_KEYS, _TIMES, st.integers(0, 2**31 - 1)),
    st.tuples(_KEYS, _TIMES, st.integers(0, 2**31 - 1)),
)
def test_bytes_sort_as_keys_do(name: str, one: tuple[bytes, int, int], other: tuple[bytes, int, int]) -> None:
    """By the key inside, then by the start, then by the other number; and the bytes decode to the key."""
    write, read = serde(name).serialize, serde(name).deserialize
    assert read(write(one)) == one
    assert (write(one) < write(other)) == (one < other)
    assert inner_key(write(one)) == one[0]
    assert write(one).startswith(prefix_of(one[0]))
    assert write(one).startswith(prefix_of(other[0])) == (one[0] == other[0])
