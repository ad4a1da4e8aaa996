"""One deadline shared by everything that waits for the same end."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock, in seconds. Waits ask `left`, never a timeout of their own."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.left <= 0.0

    def part(self, fraction: float) -> Deadline:
        """A deadline at `fraction` (0 to 1) of what is left now."""
        return Deadline.after(self.left * fraction)
