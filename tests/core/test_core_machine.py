"""The core under events in any order that an engine, ranks and tiers could send, and some that they should not."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from played import Played, key

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.groups import Group
from kvtier.core.tables import Phase

REQUESTS = [f"r{n}" for n in range(4)]
TIERS = ["disk", "mooncake"]
PROMPTS = ["ABCDEF", "ABCXYZ", "Q", "ABC"]
CAUSES = ["ok", "ok", "ok", "absent", "checksum", "cancelled", "io_error"]

requests = st.sampled_from(REQUESTS)
tiers = st.sampled_from(TIERS)
prompts = st.sampled_from(PROMPTS)
which = st.integers(0, 30)
small = st.integers(0, 6)


class Events(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 9),
        ranks=st.integers(1, 2),
        share=st.sampled_from([0.0, 0.5, 1.0]),
        groups=st.sampled_from(
            [(Group(16),), (Group(16), Group(32)), (Group(16), Group(16, window_blocks=1))],
        ),
    )
    def start(self, slots: int, ranks: int, share: float, groups: tuple[Group, ...]) -> None:
        self.p = Played(slots, TIERS, ranks=ranks, promote_share=share, groups=groups)
        self.groups = groups
        self.answered: dict[str, int] = {}
        self.asks: list[fx.Ask] = []
        self.ranks_out: dict[int, int] = {}
        self.tiers_out: list[fx.StartTier] = []
        self.loading: set[str] = set()
        self.stores_out: set[int] = set()

    def group_keys(self, prompt: str, group: int) -> list[bytes]:
        """Blocks of 32 tokens hold two letters of a prompt."""
        letters = self.groups[group].block_tokens // 16
        return [key(prompt[: end + letters], group) for end in range(0, len(prompt) - letters + 1, letters)]

    def send(self, kind: type[ev.Event], *fields: object) -> None:
        effects = self.p.send(kind, *fields)
        for effect in effects:
            if isinstance(effect, fx.Ask):
                self.asks.append(effect)
            elif isinstance(effect, fx.StartTier):
                self.tiers_out.append(effect)
            elif isinstance(effect, fx.StartLoad | fx.StartStore):
                self.ranks_out[effect.transfer] = self.p.core.config.ranks
                if isinstance(effect, fx.StartStore):
                    self.stores_out.add(effect.transfer)
            elif isinstance(effect, fx.StoreEnded):
                self.stores_out.remove(effect.transfer)
            elif isinstance(effect, fx.LoadEnded):
                self.loading.remove(effect.request)
        self.p.effects.clear()

    # The engine.

    @rule(request=requests, prompt=prompts, device=st.sampled_from([0, 0, 16, 40]))
    def lookup(self, request: str, prompt: str, device: int) -> None:
        groups = tuple(self.group_keys(prompt, g) for g in range(len(self.groups)))
        tokens = self.p.lookup(request, *groups, device=device)
        effects, self.p.effects = self.p.effects, []
        self.asks += [effect for effect in effects if isinstance(effect, fx.Ask)]
        self.tiers_out += [effect for effect in effects if isinstance(effect, fx.StartTier)]
        if tokens:
            assert tokens > device
            self.answered[request] = tokens
        else:
            self.answered.pop(request, None)

    @precondition(lambda self: self.answered)
    @rule(number=which, all_of_it=st.booleans())
    def load(self, number: int, all_of_it: bool) -> None:
        request = sorted(self.answered)[number % len(self.answered)]
        tokens = self.answered.pop(request)
        if all_of_it:
            self.loading.add(request)
        self.send(ev.Load, request, 0, tokens if all_of_it else 0)

    @rule(request=requests, prompt=prompts, group=small, first=small)
    def offer(self, request: str, prompt: str, group: int, first: int) -> None:
        group %= len(self.groups)
        self.send(ev.Offer, request, group, first, self.group_keys(prompt, group)[first:])

    @rule(request=requests)
    def gone(self, request: str) -> None:
        self.answered.pop(request, None)
        self.send(ev.RequestGone, request)

    @rule(request=requests)
    def preempted(self, request: str) -> None:
        self.answered.pop(request, None)
        self.send(ev.Preempted, request)

    @rule()
    def reset(self) -> None:
        self.answered.clear()
        self.send(ev.Reset)
        assert self.p.held == set()

    # The ranks and the tiers.

    @precondition(lambda self: self.ranks_out)
    @rule(number=which, ok=st.booleans())
    def rank_ends(self, number: int, ok: bool) -> None:
        transfer = sorted(self.ranks_out)[number % len(self.ranks_out)]
        self.ranks_out[transfer] -= 1
        if not self.ranks_out[transfer]:
            del self.ranks_out[transfer]
        self.send(ev.RankEnded, transfer, ok)

    @precondition(lambda self: self.asks)
    @rule(number=which, held=st.integers(0, 63))
    def tier_answers(self, number: int, held: int) -> None:
        ask = self.asks.pop(number % len(self.asks))
        self.send(ev.TierAnswered, ask.tier, ask.ask, [bool(held >> i & 1) for i in range(len(ask.keys))])

    @precondition(lambda self: self.tiers_out)
    @rule(number=which, causes=st.lists(st.sampled_from(CAUSES), min_size=16, max_size=16))
    def tier_ends(self, number: int, causes: list[str]) -> None:
        start = self.tiers_out.pop(number % len(self.tiers_out))
        self.send(ev.TierEnded, start.tier, start.transfer, causes[: len(start.keys)])

    @rule(transfer=st.integers(1, 20), tier=tiers)
    def stray(self, transfer: int, tier: str) -> None:
        if transfer not in self.ranks_out:
            self.send(ev.RankEnded, transfer, True)  # noqa: FBT003
        if all((start.tier, start.transfer) != (tier, transfer) for start in self.tiers_out):
            self.send(ev.TierEnded, tier, transfer, ["ok"])

    @rule(tier=tiers, change=st.sampled_from([ev.TierUp, ev.TierLost, ev.TierDead]))
    def tier_changes(self, tier: str, change: type[ev.Event]) -> None:
        self.send(change, tier)
        if change is ev.TierDead:
            self.tiers_out = [start for start in self.tiers_out if start.tier != tier]

    @rule()
    def ranks_lost(self) -> None:
        self.send(ev.RanksLost)
        self.ranks_out.clear()
        assert not self.loading
        assert not self.stores_out

    @rule(seconds=st.sampled_from([0.1, 0.6, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.p.now += seconds
        self.send(ev.Tick)

    @rule(step=st.sampled_from([None] * 8 + [ev.Close, ev.CancelAll]))
    def close(self, step: type[ev.Event] | None) -> None:
        if step is not None:
            self.send(step)

    @invariant()
    def started_and_ended_agree(self) -> None:
        if not hasattr(self, "p"):
            return
        core = self.p.core
        assert core.transfers_out == len(self.ranks_out) + len(self.tiers_out)
        assert sum(table.promoted_held for table in core.tables) <= sum(
            int(core.config.promote_share * table.capacity) for table in core.tables
        )

    def teardown(self) -> None:
        """All that is out ends, all requests go: then nothing may be left."""
        if not hasattr(self, "p"):
            return
        while self.ranks_out or self.tiers_out:
            while self.ranks_out:
                self.rank_ends(0, ok=True)
            while self.tiers_out:
                self.tier_ends(0, ["ok"] * 16)
        for request in REQUESTS:
            self.gone(request)
        while self.tiers_out:
            self.tier_ends(0, ["cancelled"] * 16)
        self.p.require_idle()
        assert self.p.core.requests_known == 0
        assert not self.loading
        assert not self.stores_out
        if self.p.core.phase is Phase.ADMITTING:
            self.send(ev.Close)
        self.send(ev.CancelAll)
        assert self.p.core.settled


Events.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEvents = Events.TestCase
