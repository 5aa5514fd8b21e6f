"""Which blob store the scheme of ``blob.store.uri`` stands for. Reads the metadata of installed packages."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import urlsplit

from statemgr.errors import ConfigError

_GROUP = "statemgr.blob_stores"
#: The stores that come with statemgr: found without reading the metadata of every package.
_BUILT_IN = {
    "file": "statemgr.blobs.file:open_store",
    "memory": "statemgr.blobs.memory:open_store",
    "s3": "statemgr.blobs.s3.store:open_store",
}


def blob_store_of(uri: str) -> EntryPoint:
    """The entry point whose object opens the store of a URI. Raises: ConfigError when no package has one."""
    scheme = urlsplit(uri).scheme
    if scheme in _BUILT_IN:
        return EntryPoint(scheme, _BUILT_IN[scheme], _GROUP)
    installed = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if scheme not in installed:
        known = sorted({*_BUILT_IN, *installed})
        near = get_close_matches(scheme, known, n=1, cutoff=0.6)
        meant = f"did you mean {near[0]}://? Otherwise " if near else ""
        raise ConfigError(
            f"blob.store.uri must be the URI of an installed blob store, and none has the scheme {scheme!r}",
            hint=f"{meant}install a package with the entry point {scheme!r} in the group {_GROUP}; "
            f"installed are {', '.join(known)}",
            key="blob.store.uri",
        )
    return installed[scheme]
