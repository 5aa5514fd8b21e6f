"""Carries statemgr's typed errors through Spark's exceptions, which keep only their text. Pure."""

from __future__ import annotations

import base64
import binascii
import re

from statemgr.errors import StatemgrError, from_json

_MARK = re.compile(r"\[statemgr-error ([A-Za-z0-9+/=]+)\]")


def marked(error: StatemgrError) -> str:
    """Return the error's text with the encoded error inside, for :func:`find`."""
    # base64, because Spark quotes and indents tracebacks, which would break JSON
    data = base64.b64encode(error.to_json().encode()).decode()
    return f"{type(error).__name__}: {error} [statemgr-error {data}]"


def find(text: str) -> StatemgrError | None:
    """Return the last error in a text of :func:`marked`, or None."""
    for data in reversed(_MARK.findall(text)):
        try:
            return from_json(base64.b64decode(data, validate=True).decode())
        except (binascii.Error, ValueError, KeyError):
            continue  # a limit on the length of messages cut it off
    return None
