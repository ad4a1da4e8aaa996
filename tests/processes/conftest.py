"""Lets the tests of this folder, and the processes that they start, import `engine_bench` and their helpers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]


@pytest.fixture(autouse=True)
def _children_find_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parent / 'engine'}")
