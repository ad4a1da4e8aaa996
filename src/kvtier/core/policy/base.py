"""Which block leaves host memory when another needs its slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
Generations = NDArray[np.int32]
Mask = NDArray[np.bool_]


class Policy(Protocol):
    """Holds exactly the slots that may be evicted: ready, and leased by nobody."""

    def __len__(self) -> int: ...

    def touch(self, slots: Slots) -> None:
        """These may be evicted and were just used, in the order of the prompt: the last goes first.

        Takes in slots that it did not hold.
        """

    def forget(self, slots: Slots) -> None:
        """These are leased now, or gone. Slots that it does not hold are ignored."""

    def victims(self, count: int, spare: Callable[[Slots], Mask]) -> Slots:
        """Take out up to `count` slots, the least useful first, but none that `spare` says to keep."""
