"""The price table, a TOML file that people edit. Reads the packaged file or another one."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from statemgr.errors import InvalidError

T = TypeVar("T")
_HINT = "statemgr plan-capacity --print-prices prints a complete table"


@dataclass(frozen=True, kw_only=True)
class BlobStorePrices:
    """Prices of 1,000 requests, and of a GB (10⁹ bytes) per month in tiers: each upper limit in GB, and its price."""

    put_1000: float
    get_1000: float
    untag_1000: float
    delete_1000: float
    storage_gb: tuple[tuple[float, float], ...]

    def storage(self, size: float) -> float:
        """Return the price of storing bytes for a month."""
        cost, below = 0.0, 0.0
        for up_to, price in self.storage_gb:
            cost += max(0.0, min(size / 1e9, up_to) - below) * price
            below = up_to
        return cost


@dataclass(frozen=True, kw_only=True)
class KafkaPrices:
    """Prices of a GB of broker disk per month, and of a written GB."""

    storage_gb: float
    written_gb: float


@dataclass(frozen=True, kw_only=True)
class MachinePrices:
    """Prices of a GB per month."""

    disk_gb: float
    memory_gb: float


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A price table."""

    currency: str
    restores_per_month: float
    blob_store: BlobStorePrices
    kafka: KafkaPrices
    machines: MachinePrices


def default_table() -> str:
    """Return the text of the packaged price table."""
    return files(__package__).joinpath("prices.toml").read_text("utf-8")


def load_prices(path: Path | None) -> Prices:
    """Read a price table, or the packaged one for None. Raises: InvalidError, OSError."""
    where = str(path or "the price table")
    try:
        table = tomllib.loads(path.read_text("utf-8") if path else default_table())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidError(f"{where} is not TOML: {error}", hint=_HINT) from error
    groups = {"blob_store": BlobStorePrices, "kafka": KafkaPrices, "machines": MachinePrices}
    values: dict[str, Any] = dict(table)
    for name, kind in groups.items():
        group = values.get(name)
        if not isinstance(group, dict):
            raise InvalidError(f"{where} has no table [{name}]", hint=_HINT)
        if name == "blob_store":
            group = group | {"storage_gb": _tiers(group.get("storage_gb"), where)}
        values[name] = _made(kind, group, f"[{name}] of {where}")
    return _made(Prices, values, where)


def _made(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a dataclass from exactly its fields. Prices must be numbers that are not negative. Raises: InvalidError."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    wrong = [*(f"{name} is missing" for name in names if name not in values)]
    wrong += [f"{name} is unknown" for name in values if name not in names]
    wrong += [f"{name} is not a price" for name, value in values.items() if not _is_price(name, value)]
    if wrong:
        raise InvalidError(f"{where}: {'; '.join(wrong)}", hint=_HINT)
    return kind(**values)


def _is_price(name: str, value: object) -> bool:
    if name == "currency":
        return isinstance(value, str)
    if isinstance(value, tuple | BlobStorePrices | KafkaPrices | MachinePrices):
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _tiers(found: object, where: str) -> tuple[tuple[float, float], ...]:
    if isinstance(found, int | float):
        return ((math.inf, float(found)),)
    try:
        tiers = tuple((float(tier["up_to"]), float(tier["price"])) for tier in found)  # type: ignore[attr-defined]
    except (TypeError, KeyError, ValueError):
        tiers = ()
    rising = all(one[0] < following[0] for one, following in pairwise(tiers))
    if not tiers or not rising or tiers[-1][0] != math.inf or any(price < 0 for _, price in tiers):
        raise InvalidError(
            f"{where}: storage_gb of [blob_store] is neither a price nor rising tiers that end with up_to = inf",
            hint=_HINT,
        )
    return tiers
