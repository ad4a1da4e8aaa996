"""What the ranks are to do in one engine step: plain data, the same for every rank."""

from __future__ import annotations

import msgspec

from kvtier.core.ids import RequestId, TransferId
from kvtier.transfer.base import RankTransfer


class LoadWork(msgspec.Struct, frozen=True):
    """A request's load: one transfer a KV cache group. It is over when all of them have ended."""

    request: RequestId
    transfers: list[RankTransfer]


class StepWork(msgspec.Struct, frozen=True):
    """Cancels come first, then loads; stores begin once the device has computed this step."""

    loads: list[LoadWork] = []
    stores: list[RankTransfer] = []
    cancels: list[TransferId] = []
    """stores whose device blocks are about to be reused: dropped if queued, waited for if running"""
    spoiled: list[RequestId] = []
    """loads that were out at a reset: report them failed, whatever their copy did"""
    off: bool = False
    """kvtier has switched itself off: drop what is queued, report every load as failed"""
