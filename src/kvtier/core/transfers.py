"""Transfers that are out: started, and not yet told to have ended.

Completions pair by transfer id, never by key. What ends here that is not out came from outside and is
counted, not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.core.ids import Key, RequestId, TierName, TransferId
from kvtier.core.leases import Lease
from kvtier.core.tables import Move


class Kind(StrEnum):
    STORE = "store"
    LOAD = "load"
    DEMOTE = "demote"
    PROMOTE = "promote"


@dataclass(slots=True, eq=False)
class Transfer:
    id: TransferId
    kind: Kind
    lease: Lease
    epoch: int
    started: float
    keys: list[Key]
    request: RequestId = ""
    tier: TierName = ""
    ranks_left: int = 0
    ok: bool = True
    lost: bool = False
    """its tier is lost: nobody waits for it, its end only frees the slots"""
    move: Move = Move.RUNNING
    waiters: set[RequestId] = field(default_factory=set)
    """requests whose lookup goes on when this ends"""


class Transfers:
    def __init__(self) -> None:
        self._out: dict[TransferId, Transfer] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._out)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._out.values()))

    def new_id(self) -> TransferId:
        self._next += 1
        return self._next - 1

    def start(self, transfer: Transfer) -> Transfer:
        self._out[transfer.id] = transfer
        if transfer.lease.writing:
            transfer.lease.table.writer[transfer.lease.slots] = transfer.id
        return transfer

    def get(self, transfer: TransferId) -> Transfer | None:
        return self._out.get(transfer)

    def end(self, transfer: Transfer) -> None:
        del self._out[transfer.id]

    def of_tier(self, tier: TierName) -> list[Transfer]:
        return [t for t in self._out.values() if t.tier == tier]

    def of_ranks(self) -> list[Transfer]:
        return [t for t in self._out.values() if not t.tier]
