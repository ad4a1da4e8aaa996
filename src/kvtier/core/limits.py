"""Limits of the core in one place, each with its reason. Sizes in blocks unless the name says otherwise."""

from __future__ import annotations

TIER_BATCH_BLOCKS = 16
"""Blocks of one transfer with a lower tier. 16 x 2 MiB is 32 MiB: 10-20 ms on a fast disk, so what has
arrived by a deadline is never far behind, and a message's cost (about 100 us) stays below 2 %."""

PROMOTES_IN_FLIGHT_MAX = 64
"""Promotions out at one tier. 64 batches x 16 blocks: a 128k-token prompt in blocks of 128 tokens."""

DEMOTES_IN_FLIGHT_MAX = 4
"""Demotions out at one tier: enough to keep its writers busy, few enough that host slots leased for
them (4 x 16 blocks) stay a small share and a close waits for at most that much writing."""

DEMOTE_BATCHES_LOOKED_AT_MAX = 64
"""Batches taken from a queue in one call, most of which may hold only what has been evicted since: 64 x
about 10 us stays below a pump's millisecond. The next call or tick goes on."""

ASK_KEYS_MAX = 4096
"""Keys of one ask: 4096 x (34 bytes + 3 of framing) is 148 KiB, below the message limit of a channel."""

BAD_BLOCK_PAUSE_S = 60.0
"""A block that failed its check is not asked for again for this long, in any tier."""

BAD_BLOCKS_MAX = 4096
"""Keys remembered as bad; the oldest are forgotten first. 4096 x about 150 bytes is 600 KiB."""

STORY_EVENTS = 512
"""Events kept for the story of a bug: a few seconds of a busy engine."""
