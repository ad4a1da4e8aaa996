"""Real vLLM on CPU: loaded bytes are stored bytes, outputs are those of the device's own cache, and faults end well.

The engines are shared: a test leaves the device's cache as it likes, and uses prompts of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_process import Engine, difference, wrong_loads

from kvtier.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

CLOSE = 1e-3
"""of log probabilities: a right load differs by 0.0, a wrong block by 0.02 and more"""

SMALL_DEVICE = {"num_gpu_blocks_override": 45, "max_model_len": 1024}
LONG = 900
LONG_BLOCKS = LONG // 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("host") / "e", model, {"host": {"size": "128MiB"}}, **SMALL_DEVICE)
    try:
        yield engine
    finally:
        engine.close()


def check_bytes(engine: Engine) -> None:
    assert wrong_loads(engine.moved("store"), engine.moved("load")) == []


def test_a_load_is_bit_equal_and_gives_what_the_device_cache_gives(engine: Engine) -> None:
    prompt = (1, LONG)
    (cold,) = engine.run(prompt)
    (device,) = engine.run(prompt)
    assert engine.forget()
    before = len(engine.moved("load"))
    (host,) = engine.run(prompt)
    assert (cold["cached"], device["cached"], host["cached"]) == (0, LONG_BLOCKS * 32, LONG_BLOCKS * 32)
    assert len(engine.moved("load")) - before == LONG_BLOCKS
    check_bytes(engine)
    assert difference(device["first"], host["first"]) < CLOSE
    assert host["tokens"] == device["tokens"]


def test_a_wrong_byte_would_have_been_seen(engine: Engine) -> None:
    prompt = (2, LONG)
    engine.run(prompt)
    (device,) = engine.run(prompt)
    engine.forget()
    engine.want("corrupt-load")
    (corrupted,) = engine.run(prompt)
    assert difference(device["first"], corrupted["first"]) > 10 * CLOSE
    wrong = wrong_loads(engine.moved("store"), engine.moved("load"))
    assert len(wrong) == 1
    # The corrupted block is in the device's cache now; host memory still has the right one.
    engine.forget()
    (again,) = engine.run(prompt)
    assert difference(device["first"], again["first"]) < CLOSE
    worker = engine.directory / "worker.jsonl"
    notes = worker.read_text().splitlines()
    bad = next(digest for key, digest in engine.moved("load") if key == wrong[0])
    worker.write_text("".join(f"{note}\n" for note in notes if bad not in note))


def test_what_the_device_evicted_is_loaded_again(engine: Engine) -> None:
    (first,) = engine.run((3, LONG))
    for seed in (4, 5, 6):
        engine.run((seed, LONG), max_tokens=1)
    before = len(engine.moved("load"))
    (again,) = engine.run((3, LONG))
    assert again["cached"] == LONG_BLOCKS * 32
    assert len(engine.moved("load")) > before
    assert difference(first["first"], again["first"]) < CLOSE
    assert again["tokens"] == first["tokens"]
    check_bytes(engine)


def test_the_next_turn_loads_what_the_last_one_generated(engine: Engine) -> None:
    (first,) = engine.run((7, 200), max_tokens=100)
    engine.forget()
    (second,) = engine.run((7, 200, *first["tokens"], 5))
    assert second["cached"] == 299 // 32 * 32
    check_bytes(engine)


def test_preempted_requests_end_and_store_nothing_wrong(engine: Engine) -> None:
    engine.forget()
    before = engine.ask("metrics")["vllm:num_preemptions_total"]
    prompts = [(seed, 200) for seed in (10, 11, 12)]
    outputs = engine.run(*prompts, max_tokens=400)
    assert [len(output["tokens"]) for output in outputs] == [400] * 3
    assert engine.ask("metrics")["vllm:num_preemptions_total"] > before, "the device was too large: nothing was tested"
    for prompt, output in zip(prompts, outputs, strict=True):
        turn = (*prompt, *output["tokens"], 5)
        engine.forget()
        (loaded,) = engine.run(turn)
        (device,) = engine.run(turn)
        assert loaded["cached"] >= 192
        assert difference(device["first"], loaded["first"]) < CLOSE
    check_bytes(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_aborts_leave_a_sound_engine(engine: Engine, steps: int) -> None:
    (first,) = engine.run((20, LONG))
    engine.forget()
    engine.ask("abort", name=str(steps), prompts=[(20, LONG), (21 + steps, LONG)], steps=steps, max_tokens=50)
    (after,) = engine.run((20, LONG))
    assert after["tokens"] == first["tokens"]
    assert difference(first["first"], after["first"]) < CLOSE
    check_bytes(engine)


def test_after_a_reset_of_the_connector_nothing_is_found(engine: Engine) -> None:
    (first,) = engine.run((30, LONG))
    assert engine.forget(connector=True)
    (cold,) = engine.run((30, LONG))
    assert cold["cached"] == 0
    assert cold["tokens"] == first["tokens"]
    engine.forget()
    (warm,) = engine.run((30, LONG))
    assert warm["cached"] == LONG_BLOCKS * 32
    check_bytes(engine)


def test_a_failed_copy_is_computed_and_not_tried_again(engine: Engine) -> None:
    (first,) = engine.run((40, LONG))
    engine.forget()
    before = len(engine.notes("worker.jsonl"))
    engine.want("fail-load")
    (computed,) = engine.run((40, LONG))
    assert computed["tokens"] == first["tokens"]
    assert difference(first["first"], computed["first"]) < CLOSE
    loads = [note for note in engine.notes("worker.jsonl")[before:] if note["way"] == "load"]
    assert [note["ok"] for note in loads] == [False]


def test_metrics_are_in_vllms_own(engine: Engine) -> None:
    time.sleep(1.1)  # stats are sent once a second
    engine.run((50, 100))
    found = engine.ask("metrics")
    assert found["kvtier_stored_blocks_total"] >= LONG_BLOCKS
    assert found["kvtier_loaded_blocks_total"] >= LONG_BLOCKS
    assert found["kvtier_host_slots"] > 0
    assert found["kvtier_off"] == 0


def test_a_bug_of_the_scheduler_side_switches_kvtier_off_and_not_the_engine(engine: Engine) -> None:
    """The last test of this engine."""
    (first,) = engine.run((60, LONG))
    engine.forget()
    engine.want("bug-step")
    (after,) = engine.run((60, LONG))
    assert after["tokens"] == first["tokens"]
    assert difference(first["first"], after["first"]) < CLOSE
    engine.forget()
    (late,) = engine.run((60, LONG))
    assert late["cached"] == 0
    assert late["tokens"] == first["tokens"]
    assert engine.log.read_text().count("a bug switched kvtier") == 1
    time.sleep(1.1)
    engine.run((61, 100))
    assert engine.ask("metrics")["kvtier_off"] == 1


def test_a_restarted_engine_loads_from_disk_until_a_bug_of_the_worker_side(tmp_path: Path, model: Path) -> None:
    settings = {
        "host": {"size": "64MiB"},
        "tiers": [{"type": "disk", "path": str(tmp_path / "disk"), "size": "256MiB"}],
        "lookup_timeout_s": 20.0,
    }
    prompts = [(seed, LONG) for seed in (70, 71)]
    first = Engine(tmp_path / "first", model, settings, **SMALL_DEVICE)
    try:
        before = [first.run(prompt)[0] for prompt in prompts]
        until = time.monotonic() + 60
        while first.ask("metrics").get("kvtier_demoted_blocks_total", 0) < 2 * LONG_BLOCKS:
            assert time.monotonic() < until, "nothing reaches the disk"
            first.run((79, 40), max_tokens=1)
            time.sleep(0.2)
        stored = first.moved("store")
    finally:
        first.close()
    second = Engine(tmp_path / "second", model, settings, **SMALL_DEVICE)
    try:
        for prompt, cold in zip(prompts, before, strict=True):
            (loaded,) = second.run(prompt)
            assert loaded["cached"] == LONG_BLOCKS * 32
            assert loaded["tokens"] == cold["tokens"]
            second.run(prompt)
            assert difference(cold["first"], loaded["first"]) < CLOSE
        assert len(second.moved("load")) >= 2 * LONG_BLOCKS
        assert wrong_loads(stored, second.moved("load")) == []
        assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["engine-0"]
        second.forget()
        second.want("bug-results")
        (after,) = second.run(prompts[0])
        assert after["tokens"] == before[0]["tokens"]
        second.forget()
        (late,) = second.run(prompts[0])
        assert late["cached"] == 0
        assert late["tokens"] == before[0]["tokens"]
        assert second.log.read_text().count("a bug switched kvtier's worker side off") == 1
    finally:
        second.close()


def test_a_bad_configuration_refuses_the_start_with_one_line(tmp_path: Path, model: Path) -> None:
    settings = {"host": {"sise": "64MiB"}}
    engine = Engine(tmp_path / "refused", model, settings, max_model_len=1024, num_gpu_blocks_override=45)
    try:
        assert "failed" in engine.started
        lines = [line for line in engine.log.read_text().splitlines() if "errors.ConfigError: " in line]
        assert lines
        assert all("unknown key 'host.sise'; did you mean 'host.size'?" in line for line in lines)
    finally:
        engine.kill()
