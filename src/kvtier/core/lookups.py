"""Lookups: from the keys of a prompt to blocks that are leased and ready in host memory.

A lookup leases what is ready, asks the tiers for the rest, has the run that they hold promoted, and is
settled when nothing more is on its way or its deadline has passed: only what is ready then counts. What it
leased is handed to the load, or given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.core.effects import Ask, Effect, StartTier
from kvtier.core.groups import Group
from kvtier.core.ids import AskId, Key, RequestId, TierName, TransferId
from kvtier.core.leases import Lease
from kvtier.core.limits import ASK_KEYS_MAX, TIER_BATCH_BLOCKS
from kvtier.core.slots import SlotTable
from kvtier.core.state import Prompt, State
from kvtier.core.tables import READY
from kvtier.core.transfers import Kind, Transfer

_EMPTY = np.empty(0, np.int64)


@dataclass(slots=True)
class _Run:
    """One group's part of a lookup."""

    group: Group
    table: SlotTable
    keys: Sequence[Key]
    first: int
    """the first block that the device does not have in full"""
    lease: Lease
    source: dict[int, TierName] = field(default_factory=dict)
    """block index to the tier that says it has it"""

    @property
    def ready(self) -> int:
        """Blocks from the start of the prompt that the device has, or that are leased."""
        return self.first + len(self.lease)


@dataclass(slots=True)
class Wait:
    """One lookup, from its first event until its load or its end."""

    request: RequestId
    runs: list[_Run]
    device_tokens: int
    owner: int
    deadline: float
    asks: dict[AskId, tuple[TierName, int, int]] = field(default_factory=dict)
    """asks that are out: tier, group, first block asked for"""
    transfers: set[TransferId] = field(default_factory=set)
    asked: bool = False
    promoted: bool = False
    tokens: int | None = None


class Lookups:
    def __init__(self, state: State) -> None:
        self._s = state
        self._waits: dict[RequestId, Wait] = {}
        self._open: dict[RequestId, None] = {}
        """not settled, the oldest deadline first"""
        self._ask_of: dict[AskId, RequestId] = {}
        self._next_ask = 1

    def __len__(self) -> int:
        return len(self._waits)

    def all(self) -> Iterable[Wait]:
        return self._waits.values()

    def is_open(self, wait: Wait) -> bool:
        return wait.request in self._open

    def get(self, request: RequestId) -> Wait | None:
        return self._waits.get(request)

    def begin(self, request: RequestId, keys: Sequence[Sequence[Key]], device_tokens: int, now: float) -> Wait:
        s = self._s
        runs = []
        prompt = s.prompt(request)
        for group, run_keys in zip(s.config.groups, keys, strict=True):
            table = s.tables[group.size_class]
            first = min(device_tokens // group.block_tokens, len(run_keys)) if group.window_blocks is None else 0
            runs.append(_Run(group, table, run_keys, first, s.leases.read(table, _EMPTY)))
            if first:
                self._use_device_hits(table, run_keys[:first], prompt)
        wait = Wait(request, runs, device_tokens, prompt.owner, now + s.config.lookup_timeout_s)
        self._waits[request] = wait
        self._open[request] = None
        s.counts.lookups_count += 1
        return wait

    def _use_device_hits(self, table: SlotTable, keys: Sequence[Key], prompt: Prompt) -> None:
        """A prefix that the device still has is as recent in host memory."""
        found = np.array([slot for slot in table.index.get_all(keys) if slot is not None], np.int64)
        found = found[table.state[found] == READY]
        table.use(found, prompt.owner)
        prompt.add(table, found)

    def advance(self, wait: Wait, now: float, out: list[Effect]) -> None:
        """Lease what has become ready, start what can be started, settle if nothing is left to wait for."""
        if wait.tokens is not None:
            return
        writing = [self._extend(wait, run) for run in wait.runs if run.group.window_blocks is None]
        late = now >= wait.deadline
        if not late and not wait.asked:
            wait.asked = True
            self._ask(wait, now, out)
        if not late and not wait.asks and not wait.promoted:
            self._promote(wait, now, out)
            writing = [self._extend(wait, run) for run in wait.runs if run.group.window_blocks is None]
        waiting = any(writing) or bool(wait.asks) or (wait.asked and not wait.promoted)
        if waiting and not late:
            return
        self._s.counts.lookups_late_count += waiting
        self._settle(wait)

    def reopen(self, wait: Wait) -> None:
        """A settled lookup is asked again: go on if more than it answered has become ready."""
        for run in wait.runs:
            if run.group.window_blocks is None and run.ready < len(run.keys):
                slot = run.table.index.get(run.keys[run.ready])
                if slot is not None and run.table.state[slot] == READY:
                    wait.tokens = None
                    self._open[wait.request] = None
                    return

    def answered(self, ask: AskId, tier: TierName, held: Sequence[bool]) -> Wait | None:
        """The wait that goes on with this answer, or None if nobody waits for it."""
        request = self._ask_of.get(ask)
        wait = self._waits.get(request) if request is not None else None
        if wait is None or wait.asks[ask][0] != tier:
            return None
        del self._ask_of[ask]
        _, group, first = wait.asks.pop(ask)
        source = wait.runs[group].source
        for i, has in enumerate(held):
            if has:
                source.setdefault(first + i, tier)
        return wait

    def tier_lost(self, tier: TierName) -> list[Wait]:
        """Nothing is expected of this tier any more; returns the waits that asked it."""
        touched = []
        for wait in self._waits.values():
            gone = [ask for ask, (name, _, _) in wait.asks.items() if name == tier]
            for ask in gone:
                del wait.asks[ask]
                self._ask_of.pop(ask, None)
            for run in wait.runs:
                run.source = {block: name for block, name in run.source.items() if name != tier}
            if gone:
                touched.append(wait)
        return touched

    def late(self, now: float) -> list[Wait]:
        """Lookups whose deadline has passed."""
        late = []
        for request in self._open:
            wait = self._waits[request]
            if wait.deadline > now:
                break
            late.append(wait)
        return late

    def take(self, request: RequestId) -> Wait | None:
        """End the lookup; its leases belong to the caller."""
        wait = self._waits.pop(request, None)
        if wait is not None:
            self._open.pop(request, None)
            for ask in wait.asks:
                self._ask_of.pop(ask, None)
        return wait

    def take_all(self) -> list[Wait]:
        return [wait for request in list(self._waits) if (wait := self.take(request)) is not None]

    # The steps of `advance`.

    def _extend(self, wait: Wait, run: _Run) -> bool:
        """Lease what is ready behind what is leased; True if the next block is being written."""
        found = np.array(run.table.index.run(run.keys, run.ready), np.int64)
        if not len(found):
            return False
        busy = np.flatnonzero(run.table.state[found] != READY)
        ready = found[: busy[0]] if len(busy) else found
        if len(ready):
            run.lease.extend(ready)
            run.table.owner[ready] = wait.owner
        if not len(busy):
            return False
        transfer = self._s.transfers.get(int(run.table.writer[found[busy[0]]]))
        assert transfer is not None, "a slot is being written by nobody"
        transfer.waiters.add(wait.request)
        wait.transfers.add(transfer.id)
        return True

    def _ask(self, wait: Wait, now: float, out: list[Effect]) -> None:
        tiers = [tier for tier in self._s.config.tiers if tier.name in self._s.tiers_up]
        for number, run in enumerate(wait.runs):
            if run.group.window_blocks is not None:
                continue
            rest = self._before_bad(run, now)
            for tier in tiers:
                for at in range(0, len(rest), ASK_KEYS_MAX):
                    ask = self._next_ask
                    self._next_ask += 1
                    wait.asks[ask] = (tier.name, number, run.ready + at)
                    self._ask_of[ask] = wait.request
                    keys = list(rest[at : at + ASK_KEYS_MAX])
                    self._s.counts.asked_blocks += len(keys)
                    out.append(Ask(tier.name, ask, keys))

    def _before_bad(self, run: _Run, now: float) -> Sequence[Key]:
        """Keys behind the leased ones, up to the first that no tier is asked for."""
        rest = run.keys[run.ready :]
        if self._s.bad_count:
            for i, key in enumerate(rest):
                if self._s.is_bad(key, now) and run.table.index.get(key) is None:
                    return rest[:i]
        return rest

    def _promote(self, wait: Wait, now: float, out: list[Effect]) -> None:
        """Reserve slots for the run that the tiers hold, or for its first part, and start it."""
        full = False
        for run in wait.runs:
            wanted = self._wanted(wait, run, now)
            if not wanted:
                continue
            table = run.table
            limit = int(self._s.config.promote_share * table.capacity)
            room = min(len(wanted), limit - table.promoted_held, table.available)
            if room <= 0 and limit > 0 and table.promoted_held:
                full = True  # Others hold the share: try again at the next event or ask, until the deadline.
                continue
            for tier, blocks in _batches(run, wanted[: max(room, 0)]):
                if not self._start(wait, run, tier, blocks, now, out):
                    break
        wait.promoted = not full

    def _wanted(self, wait: Wait, run: _Run, now: float) -> list[int]:
        """Blocks behind the leased ones that a tier has and host memory has not, up to the first that is nowhere.

        What host memory has between them is not evicted for them.
        """
        wanted = []
        present = []
        for block in range(run.ready, len(run.keys)):
            key = run.keys[block]
            slot = run.table.index.get(key)
            if slot is not None:
                present.append(slot)
                continue
            tier = run.source.get(block)
            if tier is None or tier not in self._s.tiers_up or self._s.is_bad(key, now):
                break
            wanted.append(block)
        if present and wanted:
            run.table.owner[present] = wait.owner
        return wanted

    def _start(
        self, wait: Wait, run: _Run, tier: TierName, blocks: list[int], now: float, out: list[Effect]
    ) -> bool:
        """Start one promotion; False if not all of it found room."""
        s = self._s
        slots, removed = run.table.take([run.keys[block] for block in blocks], wait.owner)
        s.removed(removed, out)
        if len(slots):
            keys = [run.keys[block] for block in blocks[: len(slots)]]
            run.table.mark_promoted(slots)
            lease = s.leases.write(run.table, slots)
            transfer = Transfer(s.transfers.new_id(), Kind.PROMOTE, lease, s.epoch, now, keys, tier=tier)
            s.transfers.start(transfer)
            transfer.waiters.add(wait.request)
            wait.transfers.add(transfer.id)
            out.append(StartTier(tier, transfer.id, "promote", run.group.size_class, keys, slots.tolist()))
        return len(slots) == len(blocks)

    def _settle(self, wait: Wait) -> None:
        """Decide the boundary that every group can serve, and lease just what it needs."""
        align = self._s.config.alignment_tokens
        full = [run for run in wait.runs if run.group.window_blocks is None]
        windows = [run for run in wait.runs if run.group.window_blocks is not None]
        tokens = min(
            [run.ready * run.group.block_tokens for run in full]
            or [len(run.keys) * run.group.block_tokens for run in windows]
        )
        tokens -= tokens % align
        if windows:
            tokens = _last_boundary(windows, tokens, align, wait.device_tokens)
        if tokens <= wait.device_tokens:
            tokens = 0
        for run in full:
            run.lease.keep(0, max(0, tokens // run.group.block_tokens - run.first))
        for run in windows:
            self._lease_window(run, tokens)
        wait.tokens = tokens
        self._open.pop(wait.request, None)

    def _lease_window(self, run: _Run, tokens: int) -> None:
        """Lease just the last window before the boundary, all of which is ready."""
        run.lease.keep(0, 0)
        run.first, end = _window(run, tokens)
        run.lease.extend(np.array(run.table.index.run(run.keys[:end], run.first), np.int64))


def _window(run: _Run, tokens: int) -> tuple[int, int]:
    """The blocks that a boundary needs of a group that needs only the last ones."""
    assert run.group.window_blocks is not None
    end = tokens // run.group.block_tokens
    return max(0, end - run.group.window_blocks), end


def _last_boundary(windows: list[_Run], tokens: int, align: int, device_tokens: int) -> int:
    """The last boundary up to `tokens` that all these groups can serve, or 0.

    Usually that is the first one tried; if it is not, all are tried at once.
    """
    floor = device_tokens - device_tokens % align
    for boundaries in (np.array([tokens], np.int64), np.arange(floor + align, tokens, align)):
        served = boundaries > device_tokens
        if not served.any():
            continue
        for run in windows:
            size = run.group.block_tokens
            assert run.group.window_blocks is not None
            ends = boundaries // size
            starts = np.maximum(0, ends - run.group.window_blocks)
            first, last = int(starts[0]), int(ends[-1])
            found = run.table.index.get_all(run.keys[first:last])
            slots = np.array([-1 if slot is None else slot for slot in found], np.int64)
            ready = (slots >= 0) & (run.table.state[slots] == READY)
            ready_before = np.concatenate(([0], np.cumsum(ready)))
            served &= ready_before[ends - first] - ready_before[starts - first] == ends - starts
        if served.any():
            return int(boundaries[np.flatnonzero(served)[-1]])
    return 0


def _batches(run: _Run, blocks: list[int]) -> list[tuple[TierName, list[int]]]:
    """Blocks in their order, split where the tier changes and at the size of a batch."""
    batches: list[tuple[TierName, list[int]]] = []
    for block in blocks:
        tier = run.source[block]
        if not batches or batches[-1][0] != tier or len(batches[-1][1]) == TIER_BATCH_BLOCKS:
            batches.append((tier, []))
        batches[-1][1].append(block)
    return batches
