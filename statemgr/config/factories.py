"""The names of state backends ("factories") and of blob stores (schemes of ``blob.store.uri``), and their code.

The code is named here and not imported: it is on a higher floor, and is loaded only if it is used. Other packages add
names with entry points. Each fault of their code is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import getattr_static
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from statemgr.errors import ConfigError, PrerequisiteMissing, StatemgrError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KAFKA_CHANGELOG: Final = "kafka-changelog"
BLOB_STORE: Final = "blob-store"
#: No backend: the changelog as a plain consumer reads it, where it is compared with the backends.
RAW_TOPIC: Final = "raw-topic"

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*|\.[A-Za-z_]\w*)\Z")
#: Factory → the class of its backend.
BUILT_IN: Final = {
    KAFKA_CHANGELOG: "statemgr.backends.changelog.backend:KafkaChangelogBackend",
    BLOB_STORE: "statemgr.backends.blobs.backend:BlobStoreBackend",
}
_BLOB_STORES = "statemgr.blob_stores"
#: Scheme → the function that opens the blob store.
BLOB_STORES: Final = {
    "file": "statemgr.blobs.file:open_store",
    "memory": "statemgr.blobs.memory:open_store",
    "s3": "statemgr.blobs.s3.store:open_store",
    "gs": "statemgr.blobs.clouds.gcs:open_store",
    "az": "statemgr.blobs.clouds.azure:open_store",
    "abfss": "statemgr.blobs.clouds.azure:open_store",
}
#: Scheme → the extra of statemgr that its store needs, where it has another name.
BLOB_EXTRAS: Final = {"gs": "gcs", "az": "azure", "abfss": "azure"}
T = TypeVar("T")
_HINT = "correct or update the package that has it; docs/extending.md says what it must offer"


def backend_classes() -> dict[str, str]:
    """Every factory that is installed, with the class of its backend. Reads the metadata of installed packages."""
    from importlib.metadata import entry_points

    return {**{entry.name: entry.value for entry in entry_points(group="statemgr.state_backends")}, **BUILT_IN}


def check_factories(key: str, factories: Iterable[str]) -> None:
    """Raises: ConfigError for a name that is neither an installed factory nor a dotted path to a class."""
    for factory in factories:
        if factory in BUILT_IN or _DOTTED_PATH.fullmatch(factory):
            continue
        known = backend_classes()
        if factory not in known:
            near = get_close_matches(factory, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{key} names the unknown factory {factory!r}", hint=hint, key=key)


def blob_store_of(uri: str) -> EntryPoint:
    """The function that opens the blob store of a URI, not yet loaded. Raises: ConfigError if no package has one."""
    from importlib.metadata import EntryPoint, entry_points

    scheme = urlsplit(uri).scheme
    if scheme in BLOB_STORES:
        return EntryPoint(scheme, BLOB_STORES[scheme], _BLOB_STORES)
    installed = {entry.name: entry for entry in entry_points(group=_BLOB_STORES)}
    if scheme not in installed:
        known = sorted({*BLOB_STORES, *installed})
        near = get_close_matches(scheme, known, n=1, cutoff=0.6)
        meant = f"did you mean {near[0]}://? Otherwise " if near else ""
        raise ConfigError(
            f"blob.store.uri must be the URI of an installed blob store, and none has the scheme {scheme!r}",
            hint=f"{meant}install a package with the entry point {scheme!r} in the group {_BLOB_STORES}; "
            f"installed are {', '.join(known)}",
            key="blob.store.uri",
        )
    return installed[scheme]


def plugged(
    what: str,
    call: Callable[[], T],
    kind: type | None = None,
    *,
    package: str | None = None,
    hide: Callable[[str], str] = str,
) -> T:
    """Run a step of a plug-in. Errors of statemgr pass.

    Args:
        what: the plug-in and its target, for errors.
        call: imports it, or calls it.
        kind: what the result must be: a class, or a protocol whose parts the result must have.
        package: what to install if it needs a module that is missing.
        hide: masks secrets.

    Raises: PrerequisiteMissing, with the missing ``module``; ConfigError for every other fault.
    """
    try:
        made = call()
    except StatemgrError:
        raise
    except ModuleNotFoundError as error:
        hint = f"pip install {package}" if package else f"install the package that has {error.name}"
        text = f"{what} needs {error.name}, which is not installed"
        raise PrerequisiteMissing(text, hint=hint, module=error.name) from error
    except Exception as error:
        raise ConfigError(f"{what} failed: {type(error).__name__}: {hide(str(error))}", hint=_HINT) from error
    if kind is not None and (wrong := _wrong(made, kind)):
        raise ConfigError(f"{what} gave {wrong}", hint=_HINT)
    return made


def _wrong(made: object, kind: type) -> str | None:
    """What is wrong with an object that must be of this kind; None if nothing is."""
    if made is None or isinstance(made, type):
        return f"{made!r} instead of a {kind.__name__}"
    if not getattr(kind, "_is_protocol", False):
        return None if isinstance(made, kind) else f"a {type(made).__name__} instead of a {kind.__name__}"
    parts = {name for one in kind.__mro__[:-1] for name in (*vars(one), *vars(one).get("__annotations__", ()))}
    missing = sorted(name for name in parts if name[0] != "_" and getattr_static(made, name, kind) is kind)
    return f"a {type(made).__name__} without {', '.join(missing)}" if missing else None
