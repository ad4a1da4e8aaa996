"""The one configuration, for the library, the command line and vLLM's JSON.

Rules:

1. `load_config` takes a mapping or the path of a TOML or JSON file and gives a checked `Config`, or
   raises a `ConfigError` of one line: the full key, the value, the limit, what to do.
2. Unknown keys are errors everywhere. A tier's own options are checked with the tier type's Struct:
   at once where `tier_options` names it, else by the tier's opener through `read_struct`.
3. A secret is never in here, only the place where it is found.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec

from kvtier.errors import ConfigError

TierOptions = Mapping[str, type[msgspec.Struct]]
"""The option Struct of each tier type that is known, by type."""

_T = TypeVar("_T", bound=msgspec.Struct)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_NAME_RULE = "must be 1 to 32 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit"
_RESERVED = ("device", "host")
_SIZE_RULE = "is not a size; write it as '8GiB', '512 MiB', '1.5GB' or a number of bytes"
_PLAIN = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"} | {
    "object": "a table",
    "array": "a list",
    "null": "nothing",
}
"""msgspec's names of types, in words"""


class BadValue(ConfigError, ValueError):
    """A field whose value is outside of its limits; for `__post_init__` of a config Struct.

    Also a ValueError, so that msgspec adds where in the configuration the field is.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {_show(value)}: {rule}")


class Size(int):
    """A number of bytes, written as 8589934592, "8GiB", "512 MiB" or "1.5GB"."""

    _UNITS: typing.ClassVar[dict[str, int]] = {"": 1, "b": 1} | {
        f"{letter}{suffix}": base**power
        for power, letter in enumerate("kmgtp", start=1)
        for suffix, base in (("ib", 1024), ("b", 1000))
    }

    def __new__(cls, value: int | str) -> Self:
        if isinstance(value, str):
            found = re.fullmatch(r"\s*(\d{1,19})(\.\d{1,19})?\s*([A-Za-z]*)\s*", value, re.ASCII)
            unit = cls._UNITS.get(found[3].lower()) if found else None
            if found is None or unit is None:
                raise ConfigError(f"{_show(value)} {_SIZE_RULE}")
            # The whole part stays exact: a float has no room for every byte count.
            size = int(found[1]) * unit + int(float(found[2] or 0) * unit)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = value
        else:
            raise ConfigError(f"{_show(value)} {_SIZE_RULE}")
        if not 0 <= size < 1 << 63:
            raise ConfigError(f"{_show(value)} is outside of 0 to 8 EiB; give the size that is really meant")
        return super().__new__(cls, size)

    def __str__(self) -> str:
        """The shortest exact form that reads back as the same size."""
        for power, letter in reversed(list(enumerate("KMGTP", start=1))):
            if self and self % 1024**power == 0:
                return f"{int(self) // 1024**power}{letter}iB"
        return f"{int(self)}"


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host tier: one region of host memory an engine."""

    size: Size = Size("4GiB")
    """bytes of the region"""
    promote_share: float = 0.5
    """share of the slots that promotions may hold at a time; the rest stays for stores"""

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise BadValue("size", self.size, "must be more than 0; give the host memory to use, as in '8GiB'")
        if not 0 < self.promote_share <= 1:
            raise BadValue("promote_share", self.promote_share, "must be above 0 and at most 1; 0.5 is the default")


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One lower tier. In a mapping the options stand beside `type`, not in a table of their own."""

    type: str
    name: str = ""
    """unique; the type where it is not given"""
    process: bool = True
    """a process of its own; false runs the tier in a thread, which the vLLM connector refuses"""
    write: Literal["through", "never"] = "through"
    """`through`: every block stored in host memory is demoted too; `never`: the tier is only read"""
    options: dict[str, Any] = {}
    """the tier type's own options, not yet checked"""

    def __post_init__(self) -> None:
        if not self.type:
            raise BadValue("type", self.type, "must name a type of tier, as in 'disk'")
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.type)
        if not _NAME.fullmatch(self.name):
            raise BadValue("name", self.name, _NAME_RULE)
        if self.name in _RESERVED:
            raise BadValue("name", self.name, "is the name of a built-in tier; choose another one")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a user may set."""

    name: str = "kvtier"
    """tells two kvtier children of one vLLM MultiConnector apart"""
    host: HostConfig = HostConfig()
    tiers: list[TierConfig] = []
    """the lower tiers, nearest first"""
    engine_blocks_per_block: int = 1
    """how many of the engine's own blocks one block spans"""
    lookup_timeout_s: float = 1.0
    """how long a request waits for lower tiers; then what has arrived counts"""
    close_timeout_s: float = 2.0
    """the one deadline of a close; vLLM gives its whole engine core 5 s"""
    weights_version: str | None = None
    """what the weights are called, in place of a digest of their files; equal version = equal weights"""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadValue("name", self.name, _NAME_RULE)
        if self.engine_blocks_per_block < 1:
            raise BadValue("engine_blocks_per_block", self.engine_blocks_per_block, "must be at least 1")
        for field in ("lookup_timeout_s", "close_timeout_s"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise BadValue(field, value, "must be a finite number of seconds above 0")
        if self.weights_version == "":
            raise BadValue("weights_version", "", "must not be empty; leave it out to have it found from the weights")
        for index, tier in enumerate(self.tiers):
            first = next(i for i, other in enumerate(self.tiers) if other.name == tier.name)
            if first != index:
                raise BadValue(
                    f"tiers[{index}].name", tier.name, f"is tiers[{first}]'s name too; give each tier its own `name`"
                )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that `load_config` reads back as an equal Config, and that JSON and TOML can hold."""
        plain = msgspec.to_builtins(self, enc_hook=str)
        plain["host"]["size"] = str(self.host.size)
        plain["tiers"] = [tier.pop("options") | tier for tier in plain["tiers"]]
        if self.weights_version is None:
            del plain["weights_version"]
        return typing.cast("dict[str, Any]", plain)


def load_config(source: Mapping[str, Any] | str | Path, *, tier_options: TierOptions | None = None) -> Config:
    """Read and check a configuration.

    `source` is a mapping, as vLLM gives it, or the path of a `.toml` or `.json` file. With
    `tier_options` the tiers' types and options are checked as well. Raises ConfigError.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source, tier_options)
    path = Path(source)
    try:
        return _from_mapping(_read_file(path), tier_options)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_struct(raw: Mapping[str, Any], into: type[_T], key: str = "") -> _T:
    """Convert plain data to a config Struct, sizes included.

    `key` says where in the configuration `raw` stands, as in `tiers[0]`. Raises ConfigError.
    """
    _refuse_unknown(raw, into, key)
    try:
        return msgspec.convert(raw, into, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_words(error, raw, into, key)) from error
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError("its name must end in .toml or .json, which says how to read it")
    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}); check the path and its permissions") from error
    except ValueError as error:
        # One base of all three: not UTF-8, not TOML, not JSON.
        raise ConfigError(f"is not valid {path.suffix[1:].upper()} ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"must hold one object, not a {type(raw).__name__}")
    return raw


def _from_mapping(raw: Mapping[str, Any], tier_options: TierOptions | None) -> Config:
    tiers = raw.get("tiers", [])
    if not isinstance(tiers, list | tuple):
        raise ConfigError(f"tiers = {_show(tiers)}: must be a list, as in [{{\"type\": \"disk\", ...}}]")
    split = [_split_tier(tier, f"tiers[{index}]", tier_options) for index, tier in enumerate(tiers)]
    return read_struct({**raw, "tiers": split} if split else raw, Config)


def _split_tier(raw: object, key: str, tier_options: TierOptions | None) -> dict[str, Any]:
    """Move a tier's own options away from beside `type`, checked where its Struct is known."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f'{key} = {_show(raw)}: must be a table with a `type`, as in {{"type": "disk"}}')
    common = [field for field in TierConfig.__struct_fields__ if field != "options"]
    kind, options = raw.get("type"), {k: v for k, v in raw.items() if k not in common}
    # A type written "module:attribute" is imported, and its options checked, only when the tier is opened.
    if tier_options is not None and isinstance(kind, str) and ":" not in kind:
        if kind not in tier_options:
            raise ConfigError(f"{key}.type = {_show(kind)}: unknown{_did_you_mean(kind, tier_options)}")
        _refuse_unknown(options, tier_options[kind], key, also=common)
        read_struct(options, tier_options[kind], key)
    elif "options" in raw:
        raise ConfigError(f"unknown key '{key}.options'; write the options beside `type`")
    return {**{k: raw[k] for k in common if k in raw}, "options": options}


def _decode(kind: type, value: object) -> object:
    if kind is not Size:
        raise NotImplementedError(f"a config field cannot be a {kind.__name__}")
    try:
        return Size(typing.cast("int | str", value))
    except ConfigError as error:
        # The full message will begin with the value anyway.
        raise ValueError(str(error).removeprefix(f"{_show(value)} is ")) from error


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _known_keys(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field, kind in _fields(struct).items():
        if field in struct.__struct_fields__:
            yield prefix + field
            if _is_struct(kind):
                yield from _known_keys(kind, f"{prefix}{field}.")


def _given_keys(raw: Mapping[Any, Any], struct: type[msgspec.Struct] | None, prefix: str = "") -> Iterator[str]:
    """Every key of `raw`, down to where the Struct says that a mapping is a value."""
    fields = _fields(struct) if struct else {}
    for field, value in raw.items():
        kind = fields.get(field)
        if isinstance(value, Mapping) and value and (kind is None or _is_struct(kind)):
            yield from _given_keys(value, kind, f"{prefix}{field}.")
        else:
            yield f"{prefix}{field}"


def _refuse_unknown(
    raw: Mapping[str, Any], struct: type[msgspec.Struct], key: str, also: list[str] | None = None
) -> None:
    known = [*_known_keys(struct), *(also or [])]
    for given in _given_keys(raw, struct):
        if given not in known:
            prefix = f"{key}." if key else ""
            raise ConfigError(f"unknown key '{prefix}{given}'{_did_you_mean(given, known, prefix)}")


def _did_you_mean(given: str, known: typing.Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(given, known, n=1)
    if near:
        return f"; did you mean '{prefix}{near[0]}'?"
    return f"; known here: {', '.join(sorted(known)) or 'none'}"


def _in_words(error: msgspec.ValidationError, raw: Mapping[str, Any], into: type[msgspec.Struct], key: str) -> str:
    """msgspec's message with the full key and the value in place of a JSON path."""
    text, _, at = str(error).partition(" - at `$")
    path = at.rstrip("`").removeprefix(".")
    where = ".".join(part for part in (key, path) if part)
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        return f"{where}.{missing[1]} is missing; it has no default" if where else f"{missing[1]} is missing"
    if isinstance(error.__cause__, BadValue):
        return f"{where}.{text}" if where else text
    value, kind = _look_up(raw, into, path)
    if text.startswith("Invalid enum value"):
        text = f"must be one of {', '.join(map(repr, _choices(kind)))}"
    elif text.startswith("Expected"):
        text = re.sub(r"`(.*?)`", _name_types, text.split(", got")[0].replace("Expected", "must be"))
    return f"{where} = {_show(value)}: {text}"


def _name_types(found: re.Match[str]) -> str:
    return " or ".join(_PLAIN.get(name, name) for name in found[1].split(" | "))


def _look_up(raw: Any, kind: Any, path: str) -> tuple[Any, Any]:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if name:
            raw, kind = raw[name], _fields(kind).get(name) if _is_struct(kind) else None
        else:
            raw, kind = raw[int(index)], next(iter(typing.get_args(kind)), None)
    return raw, kind


def _choices(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [str(member) for member in kind]
    return [str(choice) for choice in typing.get_args(kind)]


def _show(value: object) -> str:
    """The value as the user wrote it, as near as plain data tells; one line, not too long."""
    shown = str(int(value)) if isinstance(value, Size) else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
