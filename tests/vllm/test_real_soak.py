"""200 requests through real vLLM: shared prefixes, evictions, aborts, a reset; every output as without kvtier."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_process import Engine, difference, wrong_loads

from kvtier.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CLOSE = 1e-3
REQUESTS = 200
ABORT_EVERY = 7
FAMILIES = 10


def prompts() -> list[tuple[int, ...]]:
    """A shared prefix each, and a suffix of its own; seeded."""
    draw = random.Random(7)
    prefix = {family: 32 * draw.randrange(6, 24) for family in range(FAMILIES)}
    made = []
    for i in range(REQUESTS):
        family = draw.randrange(FAMILIES)
        suffix = [draw.randrange(5, 500) for _ in range(draw.randrange(1, 70))]
        made.append((1000 + family, prefix[family], i % 500 + 5, *suffix))
    return made


def test_200_requests_with_aborts_and_a_reset_are_as_without_kvtier(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    plain = Engine(tmp_path / "plain", model, None, max_model_len=1024)
    try:
        expected = [plain.run(prompt, max_tokens=2)[0] for prompt in prompts()]
    finally:
        plain.close()
    settings = {
        "host": {"size": "8MiB"},
        "tiers": [{"type": "disk", "path": str(tmp_path / "disk"), "size": "64MiB"}],
        "lookup_timeout_s": 20.0,
    }
    engine = Engine(tmp_path / "kvtier", model, settings, num_gpu_blocks_override=45, max_model_len=1024)
    draw = random.Random(8)
    try:
        slots = engine.ask("metrics").get("kvtier_host_slots", 0)
        for i, prompt in enumerate(prompts()):
            if i == REQUESTS // 2:
                assert engine.forget(connector=True)
            if i % ABORT_EVERY == ABORT_EVERY - 1:
                engine.ask("abort", name=str(i), prompts=[prompt], steps=draw.randrange(5), max_tokens=20)
                continue
            (output,) = engine.run(prompt, max_tokens=2)
            assert difference(expected[i]["first"], output["first"]) < CLOSE, f"request {i} differs"
        assert wrong_loads(engine.moved("store"), engine.moved("load")) == []
        assert len(engine.moved("load")) > REQUESTS, "hardly anything was loaded: nothing was tested"
        found = settled_metrics(engine)
        assert found["kvtier_loaded_from_tiers_blocks_total"] > 0
        assert found["kvtier_evicted_blocks_total"] > 0
        assert found["kvtier_leases_out"] == 0
        assert found["kvtier_host_available_slots"] == found["kvtier_host_slots"] >= slots
        assert found["kvtier_off"] == 0
    finally:
        engine.close()


def settled_metrics(engine: Engine) -> dict[str, float]:
    """The metrics once nothing is out any more; they travel with the steps of requests."""
    until = time.monotonic() + 30
    while True:
        time.sleep(1.1)  # they are sent at most once a second
        engine.run((3, 20), max_tokens=1)
        found: dict[str, float] = engine.ask("metrics")
        if not found["kvtier_leases_out"] or time.monotonic() > until:
            return found
