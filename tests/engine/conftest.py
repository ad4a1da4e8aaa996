"""Lets the tests of this folder import `engine_bench`, and closes what they open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from engine_bench import Bench


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Opens benches, and closes those that are still open."""
    opened: list[Bench] = []

    def open_bench(*args: Any, **more: Any) -> Bench:
        opened.append(Bench(*args, **more))
        return opened[-1]

    yield open_bench
    while opened:
        opened.pop().cache.close()
