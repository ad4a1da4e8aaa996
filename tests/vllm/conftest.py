"""The helpers of these tests, importable here and in the engines' processes; no digest outlives a test."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HELPERS = str(Path(__file__).parent / "helpers")
sys.path.insert(0, HELPERS)


@pytest.fixture(autouse=True)
def _no_remembered_digests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
        yield


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A connector sends kvtier's lines where vLLM's go."""
    log = logging.getLogger("kvtier")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers = handlers
    log.setLevel(level)
