"""The whole connector under a played engine: right bytes, nothing kept for ever, whatever happens when."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_fake_engine import FakeEngine
from vllm_fakes import FakeRequest

from kvtier.transfer.base import RankEnd
from kvtier.vllm import KVTierConnector

Make = Callable[..., FakeEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[FakeEngine] = []

    def build(*args: Any, **kwargs: Any) -> FakeEngine:
        made.append(FakeEngine(*args, **kwargs))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 1000), k=tokens)


def ask(engine: FakeEngine, name: str, tokens: list[int], **kwargs: Any) -> list[int]:
    """Run one request to its end and return its output."""
    engine.add(FakeRequest(name, tokens), **kwargs)
    engine.run()
    return engine.outputs[name]


def counts(engine: FakeEngine) -> dict[str, int]:
    assert engine.scheduler._opened is not None
    store = engine.scheduler._opened.store
    store.check()
    return store.counts()


def idle(engine: FakeEngine) -> None:
    """Nothing is remembered of requests that are gone."""
    found = counts(engine)
    assert (found["leases_out"], found["transfers_out"], found["requests_known"]) == (0, 0, 0)
    assert len(engine.scheduler._books) == 0
    assert len(engine.scheduler._scheduler) == 0
    assert engine.worker._ledger.out == []
    assert found["off"] == 0
    assert not engine.scheduler._guard.off
    assert not engine.worker._guard.off


def test_a_prompt_is_loaded_from_host_memory_after_the_device_forgot_it(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    first = ask(engine, "a", tokens)
    engine.drop_device_cache()
    assert ask(engine, "b", tokens) == first
    assert engine.external["b"] == 40
    assert engine.policy == "recompute"
    idle(engine)


def test_the_last_token_is_always_left_to_compute(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 40)
    ask(engine, "a", tokens)
    engine.drop_device_cache()
    ask(engine, "b", tokens)
    assert engine.external["b"] == 36


def test_only_what_the_device_lacks_is_loaded(make: Make) -> None:
    engine = make(num_blocks=40)
    tokens = prompt(1, 41)
    ask(engine, "a", tokens)
    for prefix in [p for p in engine.cached if len(p) > 16]:
        del engine.cached[prefix]
    ask(engine, "b", tokens)
    assert engine.external["b"] == 40 - 16
    idle(engine)


def test_blocks_of_several_engine_blocks_are_loaded_in_part(make: Make) -> None:
    engine = make({"host": {"size": "1MiB"}, "engine_blocks_per_block": 3}, num_blocks=40)
    tokens = prompt(1, 41)
    ask(engine, "a", tokens)
    for prefix in [p for p in engine.cached if len(p) > 16]:
        del engine.cached[prefix]
    ask(engine, "b", tokens)
    assert engine.external["b"] == 36 - 16
    idle(engine)


def test_generated_tokens_are_stored_for_the_next_turn(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 10)
    made = ask(engine, "a", tokens, max_tokens=16)
    engine.drop_device_cache()
    ask(engine, "b", tokens + made + [5])
    assert engine.external["b"] == 24


def test_salts_share_nothing(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 48)
    ask(engine, "a", tokens)
    engine.drop_device_cache()
    engine.add(FakeRequest("b", tokens, cache_salt="y"))
    engine.run()
    assert "b" not in engine.external


def test_a_request_that_may_not_read_takes_no_lease_and_still_stores(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    ask(engine, "a", tokens)
    engine.drop_device_cache()
    before = counts(engine)["lookups_count"]
    engine.add(FakeRequest("b", tokens, skip_reading_prefix_cache=True))
    engine.run()
    assert counts(engine)["lookups_count"] == before
    engine.drop_device_cache()
    engine.add(FakeRequest("c", prompt(2, 41), skip_reading_prefix_cache=True))
    engine.run()
    engine.drop_device_cache()
    ask(engine, "d", prompt(2, 41))
    assert engine.external["d"] == 40
    idle(engine)


def test_a_step_with_nothing_new_offers_nothing(make: Make) -> None:
    engine = make()
    engine.add(FakeRequest("a", prompt(1, 9)), max_tokens=12)
    store = engine.scheduler._opened.store
    offers: list[tuple[int, int]] = []
    real = store.offer

    def offer(request: str, group: int, first: int, keys: Any, blocks: Any) -> int:
        offers.append((first, len(keys)))
        return real(request, group, first, keys, blocks)

    store.offer = offer
    engine.run()
    assert offers == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_declined_blocks_are_offered_again_when_the_next_is_full_and_at_the_end(make: Make) -> None:
    engine = make()
    store = engine.scheduler._opened.store
    offers: list[tuple[int, int]] = []

    def offer(request: str, group: int, first: int, keys: Any, blocks: Any) -> int:
        offers.append((first, len(keys)))
        assert len(blocks) == len(keys)
        return 1

    store.offer = offer
    ask(engine, "a", prompt(1, 9), max_tokens=6)
    assert offers == [(0, 2), (1, 2), (2, 1)]


def test_a_lookup_is_given_back_when_the_engine_decides_against_it(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    ask(engine, "a", tokens)
    engine.drop_device_cache()
    request = engine.add(FakeRequest("b", tokens))
    found, is_async = engine.scheduler.get_num_new_matched_tokens(request, 0)
    assert (found, is_async) == (40, True)
    assert counts(engine)["leases_out"] == 1
    engine.scheduler.update_state_after_alloc(request, engine.get_blocks("b"), 0)
    assert counts(engine)["leases_out"] == 0
    engine.abort("b")
    idle(engine)


@pytest.mark.parametrize("when", ["before the lookup", "after a hit", "after a miss", "while loading"])
def test_an_abort_at_any_moment_leaves_nothing(make: Make, when: str) -> None:
    engine = make()
    tokens = prompt(1, 41)
    ask(engine, "a", tokens)
    engine.drop_device_cache()
    request = engine.add(FakeRequest("b", tokens if when != "after a miss" else prompt(2, 41)))
    if when.startswith("after"):
        engine.scheduler.get_num_new_matched_tokens(request, 0)
    if when == "while loading":
        engine._schedule()
        assert engine.loading == {"b": "out"}
    engine.abort("b")
    engine.run()
    idle(engine)


def test_an_abort_of_a_running_request_waits_for_its_stores_and_keeps_their_bytes(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    engine.add(FakeRequest("a", tokens))
    engine.step()
    engine.step()
    engine.abort("a")
    engine.run()
    engine.drop_device_cache()
    ask(engine, "b", tokens)
    assert engine.external["b"] == 32
    idle(engine)


def test_many_finished_requests_leave_no_entry(make: Make) -> None:
    engine = make()
    for i in range(300):
        ask(engine, f"r{i}", prompt(i, 9), max_tokens=1)
    idle(engine)


@pytest.mark.parametrize("seed", range(6))
def test_preemption_never_stores_or_loads_another_requests_bytes(make: Make, seed: int) -> None:
    engine = make(num_blocks=16)
    chance = random.Random(seed)
    for i in range(12):
        engine.add(FakeRequest(f"r{i}", prompt(chance.randrange(3), 24)), max_tokens=20)
        for _ in range(chance.randrange(6)):
            engine.step()
    engine.run()
    assert sum(len(made) for made in engine.outputs.values()) == 12 * 20
    engine.drop_device_cache()
    for i in range(3):
        ask(engine, f"again{i}", prompt(i, 24))
    idle(engine)


def test_a_preempted_request_that_was_being_stored_is_loaded_or_computed_again(make: Make) -> None:
    engine = make()
    engine.add(FakeRequest("a", prompt(1, 41)), max_tokens=8)
    for _ in range(3):
        engine.step()
    engine._preempt("a")
    engine.drop_device_cache()
    for block in engine.free.values():  # whoever reads a reused block reads this
        for layer in engine.device.values():
            layer[block.block_id] = 7.0
    engine.run()
    engine.drop_device_cache()
    ask(engine, "b", prompt(1, 41))
    idle(engine)


@pytest.mark.parametrize("preempt", [False, True])
def test_nothing_of_before_a_reset_is_found_after_it(make: Make, preempt: bool) -> None:
    engine = make()
    tokens = prompt(1, 41)
    ask(engine, "a", tokens)
    engine.add(FakeRequest("running", prompt(2, 41)), max_tokens=6)
    engine.step()
    assert engine.reset(preempt=preempt) is True
    engine.run()
    engine.drop_device_cache()
    ask(engine, "b", tokens)
    ask(engine, "c", prompt(2, 41))
    assert "b" not in engine.external
    if preempt:
        assert engine.external.get("c") == 40, "computed anew after the reset"
    else:
        assert "c" not in engine.external, "computed before the reset"
    idle(engine)


def test_a_request_that_spans_a_reset_stores_nothing_even_if_it_had_no_full_block_yet(make: Make) -> None:
    engine = make()
    request = engine.add(FakeRequest("a", [1, 2, 3], skip_reading_prefix_cache=True), max_tokens=12)
    engine.step()
    assert request.num_computed_tokens == 3
    engine.reset()
    engine.run()
    assert counts(engine)["stored_blocks"] == 0
    idle(engine)


def test_a_load_that_is_out_at_a_reset_is_reported_as_failed(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    first = ask(engine, "a", tokens)
    engine.drop_device_cache()
    engine.add(FakeRequest("b", tokens))
    engine._schedule()
    assert engine.loading == {"b": "out"}
    engine.reset()
    engine.run()
    assert engine.loads_failed == 1
    assert engine.loads == 1
    assert engine.outputs["b"] == first
    idle(engine)


def test_a_failed_copy_is_recomputed_and_not_tried_again(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    first = ask(engine, "a", tokens)
    engine.drop_device_cache()
    rank = engine.worker._worker._rank
    real = rank.poll
    rank.poll = lambda: [RankEnd(end.id, ok=False, cause="the copy failed") for end in real()]
    engine.add(FakeRequest("b", tokens))
    until = time.monotonic() + 10
    while not engine.loads_failed and time.monotonic() < until:
        engine.step()
    rank.poll = real
    engine.run()
    assert (engine.loads, engine.loads_failed) == (1, 1)
    assert engine.outputs["b"] == first
    engine.drop_device_cache()
    ask(engine, "c", tokens)
    assert engine.external["c"] == 40
    idle(engine)


def test_a_refused_submit_fails_the_load_and_nothing_else(make: Make) -> None:
    engine = make()
    tokens = prompt(1, 41)
    first = ask(engine, "a", tokens)
    engine.drop_device_cache()
    rank = engine.worker._worker._rank
    real, refused = rank.submit, []

    def submit(transfers: Any) -> None:
        refused.extend(RankEnd(t.id, ok=False, cause="refused") for t in transfers)

    poll = rank.poll
    rank.submit, rank.poll = submit, lambda: [refused.pop() for _ in range(len(refused))] + poll()
    engine.add(FakeRequest("b", tokens))
    engine.step()
    rank.submit = real
    engine.run()
    assert engine.loads_failed == 1
    assert engine.outputs["b"] == first
    idle(engine)


def test_unknown_end_notices_and_foreign_requests_are_ignored(make: Make) -> None:
    engine = make()
    engine.scheduler._scheduler.ranks_ended([RankEnd(4711, ok=True, cause="ok")])
    engine.scheduler._books.received(["nobody"])
    engine.scheduler.request_finished_all_groups(FakeRequest("nobody", [1]), ([],))
    ask(engine, "a", prompt(1, 9))
    assert counts(engine)["stray_ends_count"] == 1
    idle(engine)


@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_time(make: Make, seed: int) -> None:
    """Adds, aborts, preemptions and resets, by chance; the engine checks every byte that it reads."""
    chance = random.Random(seed)
    engine = make({"host": {"size": "160KiB"}}, num_blocks=24)
    for i in range(60):
        match chance.choices(["add", "abort", "forget", "preempt", "reset", "step"], [6, 2, 2, 1, 0.5, 8])[0]:
            case "add":
                tokens = prompt(chance.randrange(5), 8 * chance.randrange(1, 6))
                skip = chance.random() < 0.1
                engine.add(
                    FakeRequest(f"r{i}", tokens, skip_reading_prefix_cache=skip), max_tokens=chance.randrange(1, 12)
                )
            case "abort" if engine.requests:
                engine.abort(chance.choice(sorted(engine.requests)))
            case "forget":
                engine.drop_device_cache()
            case "preempt" if engine.running:
                engine._preempt(chance.choice(engine.running))
            case "reset":
                engine.reset()
            case _:
                engine.step()
    engine.run()
    idle(engine)


def test_an_idle_engine_is_kept_stepping_for_less_than_a_second(make: Make) -> None:
    engine = make()
    ask(engine, "a", prompt(1, 41))
    side = engine.scheduler._scheduler
    assert not engine.scheduler.has_pending_push_work()
    side._store.offer("ghost", 0, 0, [b"k" * 34], [1])
    now = [time.monotonic()]
    side._clock = lambda: now[0]
    assert engine.scheduler.has_pending_push_work()
    now[0] += 0.9
    assert engine.scheduler.has_pending_push_work()
    now[0] += 0.2
    assert not engine.scheduler.has_pending_push_work()
    meta = engine.scheduler.build_connector_meta(type("S", (), {"num_scheduled_tokens": {}, "preempted_req_ids": ()}))
    end = [RankEnd(t.id, ok=False, cause="never") for t in meta.work.stores]
    side.ranks_ended(end)
    side._store.gone("ghost")
    idle(engine)


SCHEDULER_HOOKS = ["new_request", "lookup", "allocated", "step", "finished", "ranks_ended", "wants_steps", "reset"]
WORKER_HOOKS = ["handle_preemptions", "start_loads", "submit_stores", "results", "meta"]


class Boom(Exception):
    pass


def bomb(side: Any, hook: str, after: int) -> None:
    """From its `after`-th call on, the side's hook raises."""
    real, calls = getattr(side, hook), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise Boom(hook)
        return real(*args, **kwargs)

    setattr(side, hook, broken)


@pytest.mark.parametrize("after", [0, 1, 3, 6])
@pytest.mark.parametrize("hook", [*SCHEDULER_HOOKS, *WORKER_HOOKS])
def test_a_bug_in_any_hook_switches_kvtier_off_and_not_the_engine(make: Make, hook: str, after: int) -> None:
    def mutate(scheduler: KVTierConnector, worker: KVTierConnector) -> None:
        side = scheduler._scheduler if hook in SCHEDULER_HOOKS else worker._worker
        bomb(side, hook, after)

    engine, sane = make(mutate=mutate), make()
    for at in (engine, sane):
        for i in range(5):
            at.add(FakeRequest(f"r{i}", prompt(i % 2, 41)), max_tokens=6)
            at.step()
            at.drop_device_cache()
            if i == 2:
                at._preempt(at.running[-1])
            if i == 3:
                at.reset()
        at.run()
    assert engine.outputs == sane.outputs
    off = engine.scheduler._guard.off
    assert off or engine.worker._guard.off or hook in ("wants_steps", "reset") or after > 1
    if engine.worker._guard.off:
        assert off, "the scheduler side learns of it"
    if off:
        engine.add(FakeRequest("late", prompt(0, 41)))
        assert engine.scheduler.get_num_new_matched_tokens(engine.requests["late"], 0) == (0, False)
        engine.run()
        assert "late" not in engine.external
        assert engine.scheduler._opened.store.counts()["off"] == 1
