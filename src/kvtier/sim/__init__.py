"""The deterministic simulator: the real core and driver over a fake clock and played ranks, tiers and engine."""
