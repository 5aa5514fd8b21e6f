"""Keeps credentials out of what boto3 and its libraries log. Touches their loggers only.

At the level DEBUG they log the headers of every request, and what these are signed from.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable

from statemgr.config.secrets import MASK, without

_LIBRARIES = ("botocore", "boto3", "s3transfer", "urllib3")
#: A session token that the SDK has renewed by itself, as a header or a parameter, in any quoting.
_TOKEN = re.compile(r"(x-amz-security-token\W{1,6})[\w+/=%-]{16,}", re.IGNORECASE)


class _Hiding(logging.Filter):
    """Masks what is secret in the text of a record, and of the error that it comes with."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._texts: frozenset[str] = frozenset()

    def add(self, texts: Iterable[str]) -> None:
        """Hide these, too."""
        with self._lock:
            self._texts |= {text for text in texts if len(text) > 3}

    def filter(self, record: logging.LogRecord) -> bool:
        """Every record passes, masked."""
        try:
            record.msg, record.args = self._masked(record.getMessage()), ()
        except Exception:  # a record that its library made wrongly
            record.msg, record.args = "(a message that cannot be formatted)", ()
        if record.exc_info and not record.exc_text:
            record.exc_text = self._masked(logging.Formatter().formatException(record.exc_info))
        return True

    def _masked(self, text: str) -> str:
        return _TOKEN.sub(rf"\g<1>{MASK}", without(self._texts, text))


_HIDING = _Hiding()


def hide(texts: Iterable[str]) -> None:
    """Mask these texts in what the libraries log from now on; all their loggers that exist by now are included."""
    _HIDING.add(texts)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] in _LIBRARIES and isinstance(logger, logging.Logger):
            logger.addFilter(_HIDING)
