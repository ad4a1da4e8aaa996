"""kvtier's part of vLLM's `--kv-transfer-config`, and what else of it must be right.

`kv_connector_extra_config` may hold others' keys; ours is "kvtier": the settings themselves, or the path of a
TOML or JSON file with them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from kvtier.config import Config, load_config
from kvtier.errors import ConfigError
from kvtier.tiers.registry import tier_options

log = logging.getLogger("kvtier")

KEY = "kvtier"


def read_settings(extra_config: Mapping[str, Any]) -> Config:
    """The settings in `kv_connector_extra_config`. Raises ConfigError, one line."""
    raw = extra_config.get(KEY, {})
    if not isinstance(raw, str | Mapping):
        raise ConfigError(f'"{KEY}" = {raw!r}: must be a table of settings or the path of a .toml or .json file')
    config = load_config(raw, tier_options=tier_options())
    for index, tier in enumerate(config.tiers):
        if not tier.process:
            raise ConfigError(
                f"tiers[{index}].process = False: a tier inside of vLLM's scheduler process could end it: "
                "leave it out, for a process of its own"
            )
    return config


def check_role(kv_transfer_config: Any) -> None:
    """Raises ConfigError."""
    if kv_transfer_config.kv_role != "kv_both":
        raise ConfigError(f"kv_role = {kv_transfer_config.kv_role!r}: kvtier stores and loads: set it to 'kv_both'")


def recompute_failed_loads(vllm_config: Any, parent: Any | None) -> None:
    """Have vLLM compute what failed to load, instead of failing the request. Raises ConfigError.

    vLLM reads the policy of its own configuration right after it made the connector. A MultiConnector hands
    over a copy, and what is set there is never read.
    """
    if parent is None:
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            log.info("kv_load_failure_policy was set to 'recompute': a load that fails is computed")
    elif parent._kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy is 'fail', so that a load that fails would fail its request: add "
            '"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"'
        )


def parent_of(connector: Any) -> Any | None:
    """The MultiConnector that is making `connector` now, or None. For its constructor alone.

    vLLM does not tell a child that it is one. What is asked is who called.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is connector:
        frame = frame.f_back
    caller = frame.f_locals.get("self")
    return caller if isinstance(caller, MultiConnector) else None
