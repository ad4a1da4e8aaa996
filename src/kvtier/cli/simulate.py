"""`kvtier sim`: run seeds of the deterministic simulator, or one of them again with its story.

Prints the first failing seed with the check that failed and what led to it, and exits with 1.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer

from kvtier.cli import exits
from kvtier.sim.simulation import Outcome, Simulation


def sim_command(
    seeds: Annotated[str, typer.Option(help="How many seeds to run, or a range of them: A..B, without B.")] = "100",
    replay: Annotated[int | None, typer.Option(help="Run this seed alone and tell what happened in it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Run the simulator: the real core and driver with played ranks, tiers and engine, and faults of all kinds."""
    chosen = [replay] if replay is not None else _range(seeds)
    began = time.monotonic()
    coverage: Counter[str] = Counter()
    failed: Outcome | None = None
    done = 0
    last: Outcome | None = None
    with _progress(len(chosen), quiet=as_json) as advance:
        for seed in chosen:
            last = Simulation(seed, story=replay is not None).run()
            coverage.update(last.coverage)
            done += 1
            advance()
            if last.failure:
                failed = last
                break
    seconds = time.monotonic() - began
    told = failed if failed is not None else last if replay is not None else None
    if as_json:
        plain = {
            "ok": failed is None,
            "seeds": done,
            "seconds": round(seconds, 3),
            "failure": None if failed is None else {"seed": failed.seed, "check": failed.failure},
            "digest": last.digest if last is not None and replay is not None else None,
            "coverage": dict(sorted(coverage.items())),
            "story": list(told.story) if told is not None else [],
        }
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(plain)) + b"\n")
    else:
        _print(failed, told, coverage, done, seconds)
    if failed is not None:
        raise typer.Exit(exits.PROBLEM)


def _range(seeds: str) -> range:
    """`100`: the first hundred; `A..B`: from A up to, without, B."""
    match = re.fullmatch(r"(?:(\d+)\.\.)?(\d+)", seeds)
    if match is None or int(match[1] or 0) >= int(match[2]):
        raise typer.BadParameter(f"{seeds!r} is neither a count nor a range A..B with A below B", param_hint="--seeds")
    return range(int(match[1] or 0), int(match[2]))


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; gives what to call after each seed."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("seeds", total=total)
        yield lambda: bar.advance(task)


def _print(failed: Outcome | None, told: Outcome | None, coverage: Counter[str], done: int, seconds: float) -> None:
    if told is not None:
        print("\n".join(told.story))
    if failed is not None:
        print(f"seed {failed.seed} failed: {failed.failure}\nagain: kvtier sim --replay {failed.seed}")
        return
    reached = ", ".join(f"{name} {count}" for name, count in sorted(coverage.items()) if count)
    print(f"reached: {reached}")
    print(f"{done} seeds passed in {seconds:.1f} s")
