"""Counters of the core. Only ever grow; the unit is the last word of each name."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct):
    lookups_count: int = 0
    lookups_late_count: int = 0
    """settled by their deadline with something still on its way"""
    asked_blocks: int = 0
    loaded_blocks: int = 0
    loaded_from_tiers_blocks: int = 0
    """of the loaded blocks, those that came from a lower tier for this load"""
    loads_failed_count: int = 0
    stored_blocks: int = 0
    stores_failed_blocks: int = 0
    declined_blocks: int = 0
    """offered with no slot to put them in"""
    evicted_blocks: int = 0
    demoted_blocks: int = 0
    demotes_failed_blocks: int = 0
    demotes_dropped_blocks: int = 0
    """evicted before they could be demoted"""
    promoted_blocks: int = 0
    promotes_failed_blocks: int = 0
    bad_blocks: int = 0
    """failed their check: wrong bytes, another block's, or too short"""
    stray_ends_count: int = 0
    """end notices of nothing that is out"""
    resets_count: int = 0
