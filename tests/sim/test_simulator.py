"""The simulator: seeds pass, a seed is one run, rare paths are reached, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from planted import PLANTED

from kvtier.core.store import StoreCore
from kvtier.sim.simulation import Simulation

SEEDS = range(120)
MANY_SEEDS = range(1000)
PLANTED_SEEDS_MAX = 500

REACHED_IN_A_FEW = (
    "aborted while loading", "aborted while running", "aborted while waiting", "bad_blocks", "closed clean",
    "closed with a tier's memory kept", "closed with transfers out", "declined", "demotes_dropped_blocks", "healed",
    "hit again", "hit again in a tier", "hit not admitted", "load ended well", "load failed",
    "loaded_from_tiers_blocks",
    "lookup pending", "lookups_late_count", "preempted", "promote", "promotes_failed_blocks", "queued store cancelled",
    "queued tier transfer cancelled", "reset with things in flight", "running store waited for", "slots quarantined",
    "stores_failed_blocks", "tier queue full", "tier: break down", "tier: crash", "tier: hang",
    "tier transfer cancelled",
)  # fmt: skip
REACHED_IN_MANY = (
    *REACHED_IN_A_FEW, "closed with the ranks' memory kept", "slow promote", "stray_ends_count", "tier call raised",
    "tier did not open", "tier that cannot be ended", "wedged device",
)  # fmt: skip


def run(seeds: range) -> Counter[str]:
    """Run the seeds; their coverage, or the first failure with its story."""
    coverage: Counter[str] = Counter()
    for seed in seeds:
        outcome = Simulation(seed).run()
        story = "\n".join(outcome.story)
        assert not outcome.failure, f"kvtier sim --replay {seed}\n{outcome.failure}\n{story}"
        coverage.update(outcome.coverage)
    return coverage


def test_seeds_pass_and_reach_what_is_rare() -> None:
    coverage = run(SEEDS)
    assert [name for name in REACHED_IN_A_FEW if not coverage[name]] == []


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_many_seeds_pass_and_reach_what_is_rarer() -> None:
    coverage = run(MANY_SEEDS)
    assert [name for name in REACHED_IN_MANY if not coverage[name]] == []


DIGESTS = "from kvtier.sim.simulation import Simulation; print(*(Simulation(seed).run().digest for seed in range(6)))"


def test_a_seed_is_the_same_run_in_every_interpreter() -> None:
    command = [sys.executable, "-c", DIGESTS]
    runs = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("0", "1", "random")
    ]
    printed = [process.communicate(timeout=100)[0] for process in runs]
    assert printed[0] == printed[1] == printed[2]
    assert len(set(printed[0].split())) == 6, "six seeds are six different runs"


@pytest.mark.parametrize("core", PLANTED, ids=lambda core: core.__name__)
def test_a_planted_bug_is_found(core: type[StoreCore]) -> None:
    for seed in range(PLANTED_SEEDS_MAX):
        outcome = Simulation(seed, core).run()
        if outcome.failure:
            assert outcome.story, "a failure comes with what led to it"
            return
    pytest.fail(f"{core.__name__} was not found in {PLANTED_SEEDS_MAX} seeds")
