"""Invariants of the core, checked after every event in tests and in the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core.tables import QUARANTINED, WRITING, Phase
from kvtier.core.transfers import Kind

if TYPE_CHECKING:
    from kvtier.core.lookups import Lookups
    from kvtier.core.state import State
    from kvtier.core.store import StoreCore


def check(core: StoreCore, state: State, lookups: Lookups) -> None:
    """Raise AssertionError with the account that does not add up."""
    for number, table in enumerate(state.tables):
        table.check()
        readers = [0] * table.capacity
        written: list[int] = []
        for lease in state.leases.of(table):
            if lease.writing:
                written += lease.slots.tolist()
            else:
                for slot in lease.slots.tolist():
                    readers[slot] += 1
        assert readers == table.readers.tolist(), f"readers of size class {number} are not the leases that are out"
        writing = [slot for slot, at in enumerate(table.state.tolist()) if at in (WRITING, QUARANTINED)]
        assert sorted(written) == writing, "a slot is written by nobody, by two, or by one that does not hold it"
    owned = {id(t.lease) for t in state.transfers}
    for wait in lookups.all():
        owned.update(id(run.lease) for run in wait.runs)
        assert set(wait.transfers) <= {t.id for t in state.transfers}, "a lookup waits for what has ended"
        assert (wait.tokens is None) == lookups.is_open(wait), "a settled lookup is still open"
    assert owned == {id(lease) for lease in state.leases.out}, "a lease has no owner, or an owner no lease"
    for transfer in state.transfers:
        assert len(transfer.lease) == len(transfer.keys)
        assert transfer.lease.writing == (transfer.kind in (Kind.STORE, Kind.PROMOTE))
        assert not transfer.lost or transfer.kind is Kind.PROMOTE
        assert bool(transfer.tier) != bool(transfer.ranks_left), "a transfer belongs to a tier or to the ranks"
    if core.phase is not Phase.ADMITTING:
        assert not len(lookups), "a closing store still looks up"
