"""kill -9 of each part of a running real vLLM: nothing of kvtier is left, and the next start is warm and right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_process import Engine, difference

from kvtier.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

CLOSE = 1e-3
LONG = 900
CACHED = LONG // 32 * 32
PROMPTS = [(seed, LONG) for seed in range(200, 204)]


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kvtier_sockets() -> set[str]:
    """Names of the abstract sockets that exist."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@kvtier-" in line}


def test_kills_leave_nothing_and_the_next_start_is_warm_and_right(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    settings = {
        "host": {"size": "64MiB"},
        "tiers": [{"type": "disk", "path": str(tmp_path / "disk"), "size": "256MiB"}],
        "lookup_timeout_s": 20.0,
    }
    draw = random.Random(11)
    others = kvtier_sockets()

    def start(name: str) -> Engine:
        return Engine(tmp_path / name, model, settings, num_gpu_blocks_override=45, max_model_len=1024)

    def is_gone(engine: Engine) -> bool:
        alive = engine.processes()
        return not (alive["core"] or alive["worker"] or alive["tier"])

    def check_warm(engine: Engine) -> None:
        """What is on the disk is loaded, and gives what was computed before."""
        for prompt, cold in zip(PROMPTS, expected, strict=True):
            (loaded,) = engine.run(prompt)
            assert loaded["cached"] == CACHED
            assert difference(cold["first"], loaded["first"]) < CLOSE

    def kill_while_busy(engine: Engine, *kinds: str) -> None:
        """Kill in the middle of a workload; the engine ends, as vLLM does."""
        engine.begin("generate", prompts=[(draw.randrange(300, 400), LONG) for _ in range(40)], max_tokens=4)
        time.sleep(draw.uniform(0.1, 2.0))  # the random moment
        processes = engine.processes()
        kill([pid for kind in kinds for pid in processes[kind]])
        wait_for(f"the engine has ended after {kinds}", lambda: is_gone(engine))
        engine.kill()
        wait_for("its sockets are gone", lambda: not kvtier_sockets() - others, seconds=2)

    engine = start("first")
    try:
        expected = []
        for prompt in PROMPTS:
            engine.run(prompt)
            expected.append(engine.run(prompt)[0])  # a hit of the device's own cache
        # The tier process: the engine goes on, and the tier is back by itself.
        for _ in range(3):
            (tier,) = engine.processes()["tier"]
            engine.begin("generate", prompts=[PROMPTS[0], *((seed, LONG) for seed in range(210, 216))], max_tokens=4)
            time.sleep(draw.uniform(0.0, 1.0))  # the random moment
            kill([tier])
            outputs = engine.answer()
            assert difference(expected[0]["first"], outputs[0]["first"]) < 10 * CLOSE  # of another batch shape
            wait_for("the tier is back", lambda tier=tier: tier not in engine.processes()["tier"] != [])
        engine.forget()
        for prompt, cold in zip(PROMPTS, expected, strict=True):
            (loaded,) = engine.run(prompt)
            assert difference(cold["first"], loaded["first"]) < CLOSE
        demoted_before = 0.0

        def has_demoted() -> bool:
            engine.run((79, 40), max_tokens=1)
            return bool(engine.ask("metrics").get("kvtier_demoted_blocks_total", 0) > demoted_before)

        wait_for("the blocks are on the disk", has_demoted)
        time.sleep(1.0)  # the keeper of the idle engine writes the rest
        kill_while_busy(engine, "core")
    finally:
        engine.kill()
    for name, victims in (("second", ("worker",)), ("third", ("other", "core", "worker", "tier"))):
        engine = start(name)
        try:
            check_warm(engine)
            kill_while_busy(engine, *victims)
        finally:
            engine.kill()
    engine = start("last")
    try:
        check_warm(engine)
    finally:
        engine.close()
    assert is_gone(engine)
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["engine-0"]
