"""What the core knows of the engine: its KV cache groups, its size classes, its tiers."""

from __future__ import annotations

from math import lcm

import msgspec

from kvtier.core.ids import TierName


class Group(msgspec.Struct, frozen=True):
    """One KV cache group. Groups of equal row size share a size class."""

    block_tokens: int
    size_class: int = 0
    window_blocks: int | None = None
    """None: a boundary needs every block before it. Else: only the last `window_blocks` (a state: 1)."""


class TierSpec(msgspec.Struct, frozen=True):
    name: TierName
    write: bool = True
    """demote every stored block to it"""


class CoreConfig(msgspec.Struct, frozen=True):
    groups: tuple[Group, ...]
    class_slots: tuple[int, ...]
    """slots of each size class"""
    ranks: int = 1
    tiers: tuple[TierSpec, ...] = ()
    promote_share: float = 0.5
    """share of a class's slots that promotions may hold"""
    lookup_timeout_s: float = 1.0

    @property
    def alignment_tokens(self) -> int:
        """Boundaries that all groups could serve are multiples of this."""
        return lcm(*(group.block_tokens for group in self.groups))
