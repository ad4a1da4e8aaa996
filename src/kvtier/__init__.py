"""kvtier keeps the KV cache of an LLM engine alive beyond the accelerator's memory.

`kvtier.open` is the library without an engine; vLLM loads `kvtier.vllm`.
"""

from typing import TYPE_CHECKING, Any

from kvtier.errors import Closed, ConfigError, CoreBug, KVTierError, Refused, TierBroken

if TYPE_CHECKING:
    from kvtier.engine.cache import Cache
    from kvtier.engine.cache import open_cache as open

__version__ = "0.1.0"

__all__ = ["Cache", "Closed", "ConfigError", "CoreBug", "KVTierError", "Refused", "TierBroken", "open"]


def __getattr__(name: str) -> Any:
    """The library on first use: a tier process starts with every import of this package, and needs little of it."""
    if name not in ("Cache", "open"):
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    from kvtier.engine import cache

    return {"Cache": cache.Cache, "open": cache.open_cache}[name]
