"""Runs code of other packages (plug-ins), so that each of their faults is an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import TypeVar

from statemgr.errors import ConfigError, PrerequisiteMissing, StatemgrError

T = TypeVar("T")
_HINT = "correct or update the package that has it; docs/extending.md says what it must offer"


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
