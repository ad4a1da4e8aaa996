"""The library: what is stored comes back byte for byte, or not at all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_bench import BLOCK_TOKENS, BOTH, Bench, config, disk, fault

import kvtier
from kvtier.testing import leaks
from kvtier.tiers import disk_format

Open = Callable[..., Bench]


@pytest.mark.processes
def test_ten_lines_are_enough(tmp_path: Path) -> None:
    layers = [np.random.randint(0, 256, (8, 4096), dtype=np.uint8) for _ in range(2)]
    settings = {"host": {"size": "1MiB"}, "tiers": [{"type": "disk", "path": str(tmp_path), "size": "16MiB"}]}
    prompt = list(range(48))
    with kvtier.open(settings, pages=layers, block_tokens=16, namespace={"model": "mine"}) as cache:
        assert cache.store(prompt, blocks=[0, 1, 2]) == 48
        assert cache.load(prompt, blocks=[5, 6, 7]) == 48
        assert all((layer[5:8] == layer[0:3]).all() for layer in layers)


@pytest.mark.parametrize("per_block", [1, 2])
def test_a_prompt_comes_back_byte_for_byte(bench: Open, per_block: int) -> None:
    b = bench(config(), per_block=per_block)
    assert b.put(8) == 8 * BLOCK_TOKENS
    assert b.get(8) == 8 * BLOCK_TOKENS
    b.settled()


@pytest.mark.parametrize("per_block", [1, 2])
def test_the_longest_stored_prefix_is_found(bench: Open, per_block: int) -> None:
    b = bench(config(), per_block=per_block)
    b.put(5)
    rows = list(range(32, 32 + 8 * per_block))
    assert b.cache.load(b.tokens(5) + [7] * (3 * BLOCK_TOKENS), rows) == 5 * BLOCK_TOKENS
    for layer, page in enumerate(b.pages):
        assert np.array_equal(page[rows[: 5 * per_block]], b.pattern(layer, 5, 0))
        assert not page[rows[5 * per_block :]].any()
    assert b.cache.load([7, *b.tokens(5)[1:]], rows) == 0
    assert b.get(3) == 3 * BLOCK_TOKENS


def test_tokens_behind_the_last_full_block_are_not_stored(bench: Open) -> None:
    b = bench(config())
    b.fill([0, 1, 2], 0)
    assert b.cache.store(b.tokens(3)[:-1], [0, 1, 2]) == 2 * BLOCK_TOKENS
    assert b.cache.load(b.tokens(3), [5, 6, 7]) == 2 * BLOCK_TOKENS


def test_prompts_of_another_salt_are_not_found(bench: Open) -> None:
    b = bench(config())
    b.put(4, salt=b"one")
    assert b.get(4) == b.get(4, salt=b"two") == 0
    assert b.get(4, salt=b"one") == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("process", BOTH)
def test_another_namespace_is_not_found_on_the_same_disk(bench: Open, tmp_path: Path, process: bool) -> None:
    b = bench(config(disk(tmp_path, process=process)), namespace="one")
    b.put(4)
    assert b.cache.settle()
    assert b.cache.close().clean
    b = bench(config(disk(tmp_path, process=process)), namespace="two")
    assert b.get(4) == 0
    b.settled()


def test_what_was_stored_before_a_reset_is_gone_in_every_tier(bench: Open, tmp_path: Path) -> None:
    b = bench(config(disk(tmp_path)))
    b.put(4)
    b.cache.settle()
    b.cache.reset()
    assert b.get(4) == 0
    assert b.put(4) == 4 * BLOCK_TOKENS
    assert b.get(4) == 4 * BLOCK_TOKENS
    b.settled()


@pytest.mark.parametrize("process", BOTH)
@pytest.mark.parametrize("per_block", [1, 2])
def test_what_left_host_memory_comes_back_from_disk(bench: Open, tmp_path: Path, process: bool, per_block: int) -> None:
    b = bench(config(disk(tmp_path, process=process), host="512KiB"), per_block=per_block)
    assert b.put(8) == 8 * BLOCK_TOKENS
    assert b.cache.settle()
    b.crowd_out()
    assert b.get(8) == 8 * BLOCK_TOKENS
    assert b.counts("promoted_blocks", "loaded_from_tiers_blocks") == [8, 8]
    b.settled()


@pytest.mark.parametrize("process", BOTH)
def test_a_cache_is_warm_after_it_was_opened_again(bench: Open, tmp_path: Path, process: bool) -> None:
    b = bench(config(disk(tmp_path, process=process)))
    for seed in range(3):
        b.put(6, seed)
    assert b.cache.settle()
    assert b.cache.close().clean
    b = bench(config(disk(tmp_path, process=process)))
    for seed in range(3):
        assert b.get(6, seed) == 6 * BLOCK_TOKENS
    assert b.get(6, 3) == 0
    b.settled()


def test_more_than_host_memory_is_stored_as_far_as_there_is_room(bench: Open) -> None:
    b = bench(config(host="64KiB"))  # 8 rows
    assert b.counts("host_slots") == [8]
    assert b.put(12) == 8 * BLOCK_TOKENS
    assert b.get(12) == 8 * BLOCK_TOKENS
    assert b.put(4, 1) == 4 * BLOCK_TOKENS
    assert b.get(12) == 4 * BLOCK_TOKENS
    b.settled()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"host": {"size": 0}}, ["host.size", "0", "more than 0"]),
        ({"host": {"size": "900TiB"}}, ["host.size", "available", "lower"]),
        ({"host": {"size": "8 gigs"}}, ["host.size", "8 gigs", "8GiB"]),
        ({"host": {"size": 100}}, ["host.size", "100", "at least"]),
        ({"hots": {"size": 100}}, ["hots", "host"]),
        ({"tiers": [{"type": "dsik", "path": "x", "size": 1}]}, ["dsik", "disk"]),
        ({"tiers": [{"type": "no.such.module:TIER"}]}, ["no.such.module"]),
        ({"tiers": [{"type": "disk", "path": "x", "size": 1, "sizee": 2}]}, ["sizee", "size"]),
    ],
)
def test_a_wrong_value_is_named_in_one_line(wrong: dict[str, object], words: list[str]) -> None:
    with pytest.raises(kvtier.ConfigError) as caught:
        Bench(wrong)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("process", BOTH)
def test_a_path_that_is_not_a_directory_refuses_the_start(tmp_path: Path, process: bool) -> None:
    file = tmp_path / "file"
    file.write_text("not ours")
    with pytest.raises(kvtier.ConfigError, match="path = ") as caught:
        Bench(config(disk(file, process=process)))
    assert "\n" not in str(caught.value)
    assert file.read_text() == "not ours"


@pytest.mark.parametrize("process", BOTH)
def test_a_newer_disk_format_refuses_the_start(
    tmp_path: Path, process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(disk_format, "VERSION", disk_format.VERSION + 1)
        b = Bench(config(disk(tmp_path)))
        b.put(2)
        b.cache.settle()
        b.cache.close()
    with pytest.raises(kvtier.ConfigError, match=f"version {disk_format.VERSION + 1}") as caught:
        Bench(config(disk(tmp_path, process=process)))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_path_refuses_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(kvtier.ConfigError, match="path = "):
        Bench(config(disk(tmp_path)))


def test_a_closed_cache_says_so(bench: Open) -> None:
    b = bench(config())
    assert b.cache.close().clean
    for use in (lambda: b.put(1), lambda: b.get(1), b.cache.reset, b.cache.settle):
        with pytest.raises(kvtier.Closed):
            use()
    assert b.cache.close() is b.cache.close()


@pytest.mark.parametrize(
    ("tiers", "cycles"), [("host", 50), ("thread", 20), pytest.param("process", 4, marks=pytest.mark.processes)]
)
def test_opening_and_closing_leaves_nothing(tmp_path: Path, tiers: str, cycles: int) -> None:
    lower = [] if tiers == "host" else [disk(tmp_path, process=tiers == "process")]
    before = None
    for cycle in range(cycles + 1):
        b = Bench(config(*lower))
        assert b.put(4, cycle) == b.get(4, cycle) == 4 * BLOCK_TOKENS
        report = b.cache.close()
        assert report.clean, str(report)
        del b
        if before is None:
            gc.collect()
            before = leaks.take()  # what is made once a process is there now
    assert not leaks.find_leaks(before, grace_s=1.0)


@pytest.mark.parametrize("process", BOTH)
def test_a_dropped_cache_is_closed_once_by_its_finalizer(tmp_path: Path, process: bool) -> None:
    out = _run(
        f"""
        import gc, warnings
        warnings.simplefilter("always")
        sys.path.append({str(Path(__file__).parent)!r})
        from engine_bench import Bench, config, disk
        from kvtier.testing import leaks
        Bench(config()).cache.close()
        before = leaks.take()
        b = Bench(config(disk(__import__("pathlib").Path({str(tmp_path)!r}), process={process})))
        b.put(4)
        del b
        gc.collect()
        left = leaks.find_leaks(before, grace_s=3.0)
        print("left:", [each for each in left if "dropped" not in each])
        """
    )
    assert "left: []" in out.stdout
    assert out.stderr.count("ResourceWarning: kvtier was dropped, not closed") == 1
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize("process", BOTH)
def test_a_cache_that_is_open_at_exit_is_closed(tmp_path: Path, process: bool) -> None:
    out = _run(
        f"""
        sys.path.append({str(Path(__file__).parent)!r})
        from engine_bench import Bench, config, disk
        b = Bench(config(disk(__import__("pathlib").Path({str(tmp_path)!r}), process={process})))
        b.put(4)
        """
    )
    assert out.returncode == 0
    assert out.stderr == ""
    b = Bench(config(disk(tmp_path)))
    assert b.get(4) == 4 * BLOCK_TOKENS  # its last blocks had reached the disk
    b.cache.close()


@pytest.mark.processes
def test_a_forked_child_closes_nothing_of_its_parents(bench: Open, tmp_path: Path) -> None:
    b = bench(config(disk(tmp_path, process=True)))
    b.put(4)
    pid = os.fork()
    if not pid:
        report = b.cache.close()
        os._exit(0 if "forked child" in str(report) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert b.get(4) == 4 * BLOCK_TOKENS
    assert b.put(4, 1) == 4 * BLOCK_TOKENS


def test_an_interrupt_in_a_wait_leaves_no_lease(bench: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(config())
    b.put(4)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(b.store, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            b.put(4, 1)
        with pytest.raises(KeyboardInterrupt):
            b.get(4, 2) or b.get(4)
    assert b.put(4, 3) == b.get(4, 3) == 4 * BLOCK_TOKENS
    b.settled()


@pytest.mark.processes
def test_a_tier_that_cannot_be_opened_for_a_wrong_value_refuses_the_start() -> None:
    for process in (False, True):
        with pytest.raises(kvtier.ConfigError, match="open: give another bucket"):
            Bench(config({**fault("far", process=process, open="config_error"), "say": "give another bucket"}))


def _run(code: str) -> subprocess.CompletedProcess[str]:
    script = "import sys\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
