"""Tier types by name: the built-in ones, and those that other packages bring as entry points.

An entry point of the group `kvtier.tiers` names a `TierType`; `type = "module:attribute"` in the configuration names
one without being installed. A type is imported when it is first used, never before.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from kvtier.config import TierConfig, read_struct
from kvtier.core.ids import TierName
from kvtier.errors import ConfigError
from kvtier.memory.layout import Rows
from kvtier.tiers.base import Tier

GROUP = "kvtier.tiers"
_BUILT_IN = {"disk": "kvtier.tiers.disk:TIER_TYPE"}


class TierType(msgspec.Struct, frozen=True):
    """A kind of tier: the Struct of its options, and what opens it: `open(options, rows, namespace, name)`."""

    config: type[msgspec.Struct]
    open: Callable[[Any, Rows, bytes, TierName], Tier]


def tier_types() -> list[str]:
    """Every type that can be named, sorted."""
    return sorted({*_BUILT_IN, *_entry_points()})


@functools.cache
def _entry_points() -> dict[str, str]:
    """What other packages bring, by name. Reading all that is installed takes 0.1 s: once, and only where needed."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}


def tier_type(name: str) -> TierType:
    """The type called `name`. Raises ConfigError for one that does not exist or does not load."""
    target = _BUILT_IN.get(name) or (name if ":" in name else _entry_points().get(name))
    if target is None:
        near = difflib.get_close_matches(name, tier_types(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"type = {name!r}: no such type of tier{hint} (known: {', '.join(tier_types())})")
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"type = {name!r}: {target} cannot be loaded ({error}); install what it needs") from error
    if not isinstance(found, TierType):
        raise ConfigError(f"type = {name!r}: {target} is a {type(found).__name__}, it must be a TierType")
    return found


def config_type(name: str) -> type[msgspec.Struct]:
    """The Struct of a type's options. Raises ConfigError."""
    return tier_type(name).config


def tier_options() -> dict[str, type[msgspec.Struct]]:
    """Every type with the Struct of its options, as `load_config` wants it."""
    return {name: config_type(name) for name in tier_types()}


def open_tier(config: TierConfig, rows: Rows, namespace: bytes) -> Tier:
    """Check the options of `config` and open its tier on `rows`. Raises ConfigError, or TierBroken."""
    kind = tier_type(config.type)
    return kind.open(read_struct(config.options, kind.config, config.name), rows, namespace, config.name)
