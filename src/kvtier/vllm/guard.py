"""Keeps a bug of ours away from the engine: every hook is wrapped once, here.

A hook that raises switches kvtier off, for good, with one log line. From then on the hook's other way is
taken: it must touch nothing that may be broken, and answer so that the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("kvtier")

_T = TypeVar("_T")


class Guard:
    """One side's switch. `on_off` is told of the bug, once, and says whether it has logged it."""

    def __init__(self, side: str, on_off: Callable[[Exception], bool]) -> None:
        self.error: Exception | None = None
        self._side = side
        self._on_off = on_off

    @property
    def off(self) -> bool:
        return self.error is not None

    def turn_off(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        logged = False
        try:
            logged = self._on_off(error)
        except Exception:  # switching off must not fail for what is broken already
            log.exception("kvtier's %s: while switching off", self._side)
        if not logged:
            log.error("a bug switched kvtier's %s off, the engine goes on without it", self._side, exc_info=error)

    def __call__(self, hook: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        """The hook's answer, or the other way's. An interrupt passes through."""
        if self.error is None:
            try:
                return hook()
            except Exception as error:  # noqa: BLE001 - whatever a bug of ours raises, the engine must not see it
                self.turn_off(error)
        return otherwise()
