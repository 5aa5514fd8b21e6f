"""Carry statemgr's typed errors through Spark's exceptions, of which only the text arrives. Pure."""

from __future__ import annotations

import base64
import binascii
import re

from statemgr.errors import StatemgrError, from_json

_MARK = re.compile(r"\[statemgr-error ([A-Za-z0-9+/=]+)\]")


def marked(error: StatemgrError) -> str:
    """The error's text with the whole error in it, for :func:`find`."""
    # base64: Spark quotes and indents tracebacks, which JSON would not survive
    data = base64.b64encode(error.to_json().encode()).decode()
    return f"{type(error).__name__}: {error} [statemgr-error {data}]"


def find(text: str) -> StatemgrError | None:
    """The last error that :func:`marked` put into a text, or None."""
    for data in reversed(_MARK.findall(text)):
        try:
            return from_json(base64.b64decode(data, validate=True).decode())
        except (binascii.Error, ValueError, KeyError):
            continue  # cut off by a limit on the length of messages
    return None
