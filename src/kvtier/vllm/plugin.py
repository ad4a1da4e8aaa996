"""Which vLLM this connector works with, and its name for vLLM's registry of connectors."""

from __future__ import annotations

import logging

from kvtier.errors import ConfigError

log = logging.getLogger("kvtier")

TESTED = ("0.32.0",)
NAME = "KVTierConnector"
_HOOKS = (
    "bind_kv_cache_manager",
    "build_connector_worker_meta",
    "get_transfer_results",
    "handle_preemptions",
    "on_new_request",
    "reset_cache",
    "update_connector_output",
)


def check_vllm() -> None:
    """Warn about a vLLM that was not tested. Raises ConfigError for one without the hooks that kvtier lives on."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    missing = [hook for hook in _HOOKS if not hasattr(base.KVConnectorBase_V1, hook)]
    missing += [name for name in ("KVConnectorTransferResults", "SupportsHMA") if not hasattr(base, name)]
    if missing:
        raise ConfigError(
            f"kvtier works with vLLM {', '.join(TESTED)}; vLLM {vllm.__version__} has no {', '.join(missing)}: "
            f"install vllm=={TESTED[-1]}"
        )
    if vllm.__version__.partition("+")[0] not in TESTED:
        log.warning("kvtier was tested with vLLM %s, not with %s", ", ".join(TESTED), vllm.__version__)


def log_as_vllm_does() -> None:
    """kvtier's lines go where vLLM's go, unless the process has set up logging for them."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.level)


def register() -> None:
    """Entry point of vLLM's general plugins: the connector is found by its name alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvtier.vllm", NAME)
