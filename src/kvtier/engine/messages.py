"""What the engine and a tier process say to each other. Lengths are bounded by the channel; never pickle."""

from __future__ import annotations

import msgspec

from kvtier.config import TierConfig
from kvtier.core.ids import AskId, TransferId
from kvtier.memory.layout import Layout
from kvtier.tiers.base import Ended, Evicted, Held, TierTransfer


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to open. The region comes as a descriptor."""

    config: TierConfig
    layout: Layout
    region_bytes: int
    namespace: bytes


class AskFor(msgspec.Struct, frozen=True, tag=True):
    ask: AskId
    keys: list[bytes]


class Submit(msgspec.Struct, frozen=True, tag=True):
    transfer: TierTransfer


class Cancel(msgspec.Struct, frozen=True, tag=True):
    transfer: TransferId


class Opened(msgspec.Struct, frozen=True, tag=True):
    pass


class OpenFailed(msgspec.Struct, frozen=True, tag=True):
    """The tier could not be opened; `yours`: a human must change the configuration."""

    yours: bool
    text: str


class Counted(msgspec.Struct, frozen=True, tag=True):
    counts: dict[str, int]


ToTier = Setup | AskFor | Submit | Cancel
FromTier = Opened | OpenFailed | Counted | Held | Ended | Evicted

encode = msgspec.msgpack.Encoder().encode
decode_to_tier = msgspec.msgpack.Decoder(ToTier).decode
decode_from_tier = msgspec.msgpack.Decoder(FromTier).decode
