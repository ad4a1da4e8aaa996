"""The configuration: what it accepts, and that each refusal is one line a user can act on."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import BadValue, Config, HostConfig, Size, TierConfig, load_config, read_struct
from kvtier.errors import ConfigError
from kvtier.tiers.disk import DiskConfig
from kvtier.tiers.registry import tier_options


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    size: Size = Size("1GiB")
    fsync: Literal["none", "interval"] = "none"
    readers: int = 2

    def __post_init__(self) -> None:
        if self.readers < 1:
            raise BadValue("readers", self.readers, "must be at least 1")


KNOWN = {"disk": DiskOptions}


def error_of(source: Any, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, **given)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2tib", 2 << 40),
        (" 7 ", 7),
        ("3B", 3),
        ("9007199254740993", 2**53 + 1),
        (4096, 4096),
        (0, 0),
    ],
)
def test_a_size_is_read_in_all_its_forms(written: str | int, size_bytes: int) -> None:
    assert Size(written) == size_bytes


@pytest.mark.parametrize(
    "written", ["8 gigs", "", "GiB", "-1GiB", "1e9", "1_000", "0x10", "٣", "8GiB.", True, 1.5, None, []]
)
def test_what_is_no_size_is_refused_with_the_valid_forms(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"8GiB.*512 MiB.*1\.5GB") as caught:
        Size(written)
    assert repr(written) in str(caught.value)


@pytest.mark.parametrize("written", [-1, 1 << 63, "9000000TiB", "9" * 19 + "PiB"])
def test_a_size_outside_of_64_bits_is_refused(written: int | str) -> None:
    with pytest.raises(ConfigError, match="8 EiB"):
        Size(written)


@given(st.integers(0, (1 << 63) - 1))
def test_a_size_reads_back_from_its_text(size_bytes: int) -> None:
    assert Size(str(Size(size_bytes))) == size_bytes


def test_an_empty_mapping_is_the_default_config() -> None:
    config = load_config({})
    assert config == Config()
    assert (config.host.size, config.close_timeout_s, config.tiers) == (4 << 30, 2.0, [])


def test_the_defaults_of_two_configs_share_no_list() -> None:
    Config().tiers.append(TierConfig(type="disk"))
    assert Config().tiers == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"hots": {"size": 1}}, "unknown key 'hots.size'; did you mean 'host.size'?"),
        ({"host": {"siez": 1}}, "unknown key 'host.siez'; did you mean 'host.size'?"),
        ({"nmae": "x"}, "unknown key 'nmae'; did you mean 'name'?"),
        ({"host": {"size": 0}}, "host.size = 0: must be more than 0"),
        ({"host": {"size": "8 gigs"}}, "host.size = '8 gigs': not a size; write it as '8GiB'"),
        ({"host": {"size": True}}, "host.size = True: not a size"),
        ({"host": {"promote_share": 0}}, "host.promote_share = 0.0: must be above 0 and at most 1"),
        ({"host": {"promote_share": 1.01}}, "host.promote_share = 1.01: must be above 0 and at most 1"),
        ({"host": {"promote_share": math.nan}}, "host.promote_share = nan: must be"),
        ({"host": {"promote_share": "half"}}, "host.promote_share = 'half': must be a number"),
        ({"host": "8GiB"}, "host = '8GiB': must be a table"),
        ({"close_timeout_s": 0}, "close_timeout_s = 0.0: must be a finite number of seconds above 0"),
        ({"close_timeout_s": math.inf}, "close_timeout_s = inf: must be a finite number"),
        ({"lookup_timeout_s": -1}, "lookup_timeout_s = -1.0: must be a finite number"),
        ({"engine_blocks_per_block": 0}, "engine_blocks_per_block = 0: must be at least 1"),
        ({"engine_blocks_per_block": True}, "engine_blocks_per_block = True: must be an integer"),
        ({"weights_version": ""}, "weights_version = '': must not be empty"),
        ({"weights_version": 3}, "weights_version = 3: must be a string or nothing"),
        ({"name": "a b"}, "name = 'a b': must be 1 to 32 of the characters"),
        ({"name": "a" * 33}, "must be 1 to 32 of the characters"),
        ({"tiers": {"disk": {}}}, "tiers = {'disk': {}}: must be a list"),
        ({"tiers": ["disk"]}, "tiers[0] = 'disk': must be a table with a `type`"),
        ({"tiers": [{"path": "/x"}]}, "tiers[0].type is missing"),
        ({"tiers": [{"type": ""}]}, "tiers[0].type = '': must name a type"),
        ({"tiers": [{"type": "disk"}, {"type": "disk"}]}, "tiers[1].name = 'disk': is tiers[0]'s name too"),
        ({"tiers": [{"type": "disk", "name": "host"}]}, "tiers[0].name = 'host': is the name of a built-in tier"),
        ({"tiers": [{"type": "disk", "name": "a/b"}]}, "tiers[0].name = 'a/b': must be 1 to 32"),
        ({"tiers": [{"type": "disk", "write": "back"}]}, "tiers[0].write = 'back': must be one of 'through', 'never'"),
        ({"tiers": [{"type": "disk", "process": "no"}]}, "tiers[0].process = 'no': must be true or false"),
        ({"tiers": [{"type": "disk", "options": {}}]}, "unknown key 'tiers[0].options'; write the options beside"),
    ],
)
def test_a_wrong_value_is_named_with_its_full_key_and_its_limit(raw: dict[str, Any], message: str) -> None:
    assert message in error_of(raw)


def test_a_key_like_no_other_lists_the_known_ones() -> None:
    assert "known here: close_timeout_s, " in error_of({"zzzzzz": 1})


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(error_of({"name": "x" * 10_000})) < 250


def test_a_struct_made_in_code_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="size = 0: must be more than 0"):
        HostConfig(size=Size(0))
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.name = 'disk'"):
        Config(tiers=[TierConfig(type="disk"), TierConfig(type="disk")])


def test_a_tier_without_a_name_is_called_by_its_type() -> None:
    raw = {"tiers": [{"type": "disk", "path": "/a"}, {"type": "disk", "name": "slow", "path": "/b"}]}
    tiers = load_config(raw).tiers
    assert [(tier.name, tier.options) for tier in tiers] == [("disk", {"path": "/a"}), ("slow", {"path": "/b"})]


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"type": "dsik"}, "tiers[0].type = 'dsik': unknown; did you mean 'disk'?"),
        ({"type": "disk"}, "tiers[0].path is missing; it has no default"),
        ({"type": "disk", "pth": "/x"}, "unknown key 'tiers[0].pth'; did you mean 'tiers[0].path'?"),
        ({"type": "disk", "path": "/x", "nam": "y"}, "unknown key 'tiers[0].nam'; did you mean 'tiers[0].name'?"),
        ({"type": "disk", "path": 3}, "tiers[0].path = 3: must be a string"),
        ({"type": "disk", "path": "/x", "size": "big"}, "tiers[0].size = 'big': not a size"),
        ({"type": "disk", "path": "/x", "fsync": "on"}, "tiers[0].fsync = 'on': must be one of 'none', 'interval'"),
        ({"type": "disk", "path": "/x", "readers": 0}, "tiers[0].readers = 0: must be at least 1"),
        ({"type": "disk", "path": "/x", "options": {}}, "unknown key 'tiers[0].options'"),
    ],
)
def test_a_known_tiers_options_are_checked_at_once(tier: dict[str, Any], message: str) -> None:
    assert message in error_of({"tiers": [tier]}, tier_options=KNOWN)


def test_a_type_by_its_import_path_is_left_to_its_opener() -> None:
    config = load_config({"tiers": [{"type": "my.mod:TYPE", "name": "mine", "depth": 3}]}, tier_options=KNOWN)
    assert config.tiers == [TierConfig(type="my.mod:TYPE", name="mine", options={"depth": 3})]


def test_options_are_read_into_the_tiers_own_struct() -> None:
    config = load_config({"tiers": [{"type": "disk", "path": "/x", "size": "3MiB"}]}, tier_options=KNOWN)
    options = read_struct(config.tiers[0].options, DiskOptions, "tiers[0]")
    assert options == DiskOptions(path="/x", size=Size(3 << 20))


def test_a_config_survives_its_mapping_and_json() -> None:
    raw = {
        "name": "left",
        "host": {"size": "1536MiB", "promote_share": 0.25},
        "tiers": [{"type": "disk", "name": "nvme", "path": "/x", "size": "10GB"}, {"type": "x", "write": "never"}],
        "engine_blocks_per_block": 4,
        "weights_version": "v7",
    }
    config = load_config(raw)
    assert config.host.size == 1536 << 20
    assert load_config(json.loads(json.dumps(config.to_mapping()))) == config
    assert load_config(Config().to_mapping()) == Config()


def test_toml_and_json_files_say_the_same(tmp_path: Path) -> None:
    toml, plain = tmp_path / "k.toml", tmp_path / "k.json"
    toml.write_text('name = "x"\n[host]\nsize = "1GiB"\n[[tiers]]\ntype = "disk"\npath = "/x"\n')
    plain.write_text('{"name": "x", "host": {"size": 1073741824}, "tiers": [{"type": "disk", "path": "/x"}]}')
    assert load_config(toml) == load_config(str(plain)) == load_config(load_config(toml).to_mapping())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("k.yaml", b"", "must end in .toml or .json"),
        ("k.toml", None, "cannot be read (No such file or directory)"),
        ("k.toml", b"name = ", "is not valid TOML ("),
        ("k.json", b"{", "is not valid JSON ("),
        ("k.json", b"[]", "must hold one object, not a list"),
        ("k.toml", b"\xff", "is not valid TOML ("),
        ("k.toml", b"nmae = 1", "unknown key 'nmae'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    text = error_of(path)
    assert text.startswith(f"{path}: ")
    assert message in text


DOCS = Path(__file__).parent.parent / "docs/configuration.md"


def test_the_page_names_every_key_and_its_default() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    documented = {key: row for row in rows for key in re.findall(r"`([^`]+)`", row.split("|")[1])}
    common = {f.name for f in msgspec.structs.fields(TierConfig)} - {"options"}
    disk = {f.name for f in msgspec.structs.fields(DiskConfig)}
    top = {f.name for f in msgspec.structs.fields(Config)} - {"host"}
    host = {f"host.{f.name}" for f in msgspec.structs.fields(HostConfig)}
    assert set(documented) == top | host | common | disk
    for struct, prefix in ((Config, ""), (HostConfig, "host."), (DiskConfig, "")):
        for field in msgspec.structs.fields(struct):
            if isinstance(field.default, int | float | Size) and field.name != "host":
                shown = f'"{field.default!s}"' if isinstance(field.default, Size) else str(field.default)
                assert f"`{shown}`" in documented[prefix + field.name], field.name


def test_the_pages_examples_are_valid() -> None:
    examples = re.findall(r"```(toml|json)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert [kind for kind, _ in examples] == ["toml", "json"]
    from_toml = load_config(tomllib.loads(examples[0][1]), tier_options=tier_options())
    in_vllm = json.loads(examples[1][1])["kv_connector_extra_config"]["kvtier"]
    assert load_config(in_vllm, tier_options=tier_options()) == from_toml
