"""The simulated world: one clock, one source of chance, one list of what happened.

Rules: everything that happens is scheduled here and happens alone, in the order of time; every choice is drawn
from `random`. So one seed decides everything, and running it again shows the same fault.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b, sha256

from kvtier.core.ids import Key

TRAIL_LINES = 40


class CheckFailed(Exception):
    """A checker found that something is wrong; `check` is its name."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.faults = True
        """things may go wrong by chance"""
        self.coverage: Counter[str] = Counter()
        self.trail: deque[str] = deque(maxlen=TRAIL_LINES)
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._digest = sha256()
        self._patterns: dict[tuple[bytes, int, int], tuple[int, int]] = {}
        self.pages_of: dict[Key, tuple[int, list[bytes]]] = {}
        """for each key: the weights that made its bytes, and the identity of each of its pages"""

    # Time.

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._todo, (self.now + seconds, self._count, act))

    def run_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Let things happen until `done`; False if it is not by `limit_s` from now."""
        end = self.now + limit_s
        while not done():
            if not self._todo or self._todo[0][0] > end:
                self.now = end
                return False
            self.now, _, act = heapq.heappop(self._todo)
            act()
        return True

    # Chance.

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def fault(self, name: str, probability: float) -> bool:
        """Whether this goes wrong now."""
        if self.faults and self.random.random() < probability:
            self.coverage[name] += 1
            return True
        return False

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    # What happened.

    def say(self, line: str) -> None:
        """Goes into the digest, and into the trail of a failing seed."""
        self._digest.update(line.encode())
        self.trail.append(f"{self.now:9.4f} {line}")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def require(self, holds: bool, check: str, message: str) -> None:  # noqa: FBT001 - a condition, like assert
        if not holds:
            raise CheckFailed(check, message)

    # Bytes.

    def pattern(self, identity: bytes, weights: int, rank: int) -> tuple[int, int]:
        """The bytes of one page on one rank: two halves, so that a torn page is told apart."""
        at = (identity, weights, rank)
        known = self._patterns.get(at)
        if known is None:
            raw = blake2b(identity + bytes((weights, rank)), digest_size=16).digest()
            known = self._patterns[at] = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
        return known
