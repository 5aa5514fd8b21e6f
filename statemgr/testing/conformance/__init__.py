"""Suites that prove a plug-in, a blob store or a state backend, as subclasses in its tests. They need pytest."""

import pytest

# before the suites are imported, so that a failed assertion shows its values
pytest.register_assert_rewrite(f"{__name__}.blob_store", f"{__name__}.state_backend")

from statemgr.testing.conformance.blob_store import BlobStoreSuite  # noqa: E402
from statemgr.testing.conformance.state_backend import StateBackendSuite  # noqa: E402

__all__ = ["BlobStoreSuite", "StateBackendSuite"]
