"""kvtier inside vLLM: `"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.vllm"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]


def __getattr__(name: str) -> Any:
    """The connector, imported when it is asked for: it imports vllm, which takes seconds and is not always there."""
    if name == "KVTierConnector":
        from kvtier.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
