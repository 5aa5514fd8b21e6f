"""Suites that prove a plug-in: :class:`BlobStoreSuite` for a blob store. They need pytest."""

import pytest

# before the suites are imported, so that a failed assertion shows its values
pytest.register_assert_rewrite("statemgr.testing.conformance.blob_store")

from statemgr.testing.conformance.blob_store import BlobStoreSuite  # noqa: E402

__all__ = ["BlobStoreSuite"]
