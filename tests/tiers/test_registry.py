"""Tier types by name: built in, by entry point, by module; and what is said about those that do not exist."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvtier.config import TierConfig, load_config
from kvtier.errors import ConfigError
from kvtier.runtime.deadline import Deadline
from kvtier.testing.fake_tier import FakeConfig, FakeTier
from kvtier.testing.tier_suite import Region
from kvtier.tiers import registry
from kvtier.tiers.disk import DiskConfig, DiskTier

FAKE = "kvtier.testing.fake_tier:TIER_TYPE"


def test_a_tier_is_opened_from_its_configuration(tmp_path: Path) -> None:
    raw = {"tiers": [{"type": "disk", "name": "ssd", "path": str(tmp_path / "t"), "size": "8MiB"}]}
    config = load_config(raw, tier_options=registry.tier_options())
    region = Region([4096], 2)
    tier = registry.open_tier(config.tiers[0], region.rows, b"ns")
    assert isinstance(tier, DiskTier)
    assert tier.name == "ssd"
    assert tier.counts()["limit_bytes"] == 8 << 20
    assert tier.close(Deadline.after(5)).clean
    region.close()


def test_a_type_can_be_named_by_its_module() -> None:
    assert registry.config_type(FAKE) is FakeConfig
    region = Region([4096], 2)
    tier = registry.open_tier(TierConfig(type=FAKE, name="f", options={"script": {"*": "miss"}}), region.rows, b"ns")
    assert isinstance(tier, FakeTier)
    assert tier.name == "f"
    assert tier.close(Deadline.after(5)).clean
    region.close()


def test_a_type_can_come_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("toy", FAKE, registry.GROUP)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == registry.GROUP else [])
    registry._entry_points.cache_clear()
    try:
        assert registry.config_type("toy") is FakeConfig
        assert registry.tier_types() == ["disk", "toy"]
        assert registry.tier_options() == {"disk": DiskConfig, "toy": FakeConfig}
    finally:
        registry._entry_points.cache_clear()


def test_an_unknown_type_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.config_type("dsik")
    assert "did you mean 'disk'?" in str(caught.value)
    assert "known: disk" in str(caught.value)


@pytest.mark.parametrize("target", ["kvtier.no_such:X", "kvtier.tiers.disk:NO_SUCH", "kvtier.tiers.disk:DiskTier"])
def test_a_type_that_does_not_load_says_why(target: str) -> None:
    with pytest.raises(ConfigError, match=target):
        registry.config_type(target)


def test_an_option_that_the_type_does_not_have_names_it(tmp_path: Path) -> None:
    region = Region([4096], 2)
    options = {"path": str(tmp_path / "t"), "size": "8MiB", "treads": 2}
    with pytest.raises(ConfigError, match=r"did you mean 'disk\.threads'"):
        registry.open_tier(TierConfig(type="disk", options=options), region.rows, b"ns")
    region.close()
