"""kvtier keeps the KV cache of an LLM engine alive beyond the accelerator's memory.

`kvtier.open` is the library without an engine; vLLM loads `kvtier.vllm`.
"""

from kvtier.engine.cache import Cache
from kvtier.engine.cache import open_cache as open  # noqa: A001 - read as kvtier.open
from kvtier.errors import Closed, ConfigError, CoreBug, KVTierError, Refused, TierBroken

__version__ = "0.1.0"

__all__ = ["Cache", "Closed", "ConfigError", "CoreBug", "KVTierError", "Refused", "TierBroken", "open"]
