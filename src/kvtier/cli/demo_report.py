"""What three runs of one workload say: the table, the checks, and the same as plain data.

A check is passed or not; the text says what was found, with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.vllm.workload import Served, SideClosed

DIFFERENCE_MAX = 1e-3
"""of a first token's log probability; one wrong block makes 0.5 to 1.2, a plain recomputation 1e-5"""

SIDES = ("scheduler", "worker")


@dataclass(frozen=True, slots=True)
class Run:
    title: str
    kvtier: bool
    served: list[Served]
    counts: dict[str, int]
    """kvtier's own, by name"""
    closed: list[SideClosed]
    phases_s: dict[str, float]
    """seconds that its start, the requests and its end took"""

    def ttft_s(self, percent: float) -> float:
        return float(np.percentile([s.ttft_s for s in self.served], percent))

    @property
    def prompt_tokens(self) -> int:
        return sum(s.prompt_tokens for s in self.served)

    @property
    def cached_tokens(self) -> int:
        return sum(s.cached_tokens for s in self.served)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def loaded_tokens(self, block_tokens: int) -> int:
        return self.counts.get("loaded_blocks", 0) * block_tokens

    def disk_tokens(self, block_tokens: int) -> int:
        """Of the loaded ones, those that were read from disk for that load."""
        return self.counts.get("loaded_from_tiers_blocks", 0) * block_tokens


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class Verdict:
    outcomes: list[Check]
    closes: list[Check]


def judge(runs: Sequence[Run], *, repeated_tokens: int, block_tokens: int) -> Verdict:
    """`repeated_tokens`: prompt tokens that an endless cache would hold, counted over the whole workload once."""
    alone, cold, warm = runs
    outcomes = [_equal(alone, cold), _equal(alone, warm)]
    loaded = cold.loaded_tokens(block_tokens)
    if repeated_tokens - alone.cached_tokens >= block_tokens:
        outcomes.append(Check("run 2 loaded what its device cache had given up", loaded > 0, f"{loaded:,} tokens"))
    disk = warm.disk_tokens(block_tokens)
    outcomes.append(Check("run 3 loaded from disk what run 2 had stored", disk > 0, f"{disk:,} tokens"))
    return Verdict(outcomes, [_closed(number, run) for number, run in enumerate(runs, 1) if run.kvtier])


def difference(one: Served, other: Served) -> float:
    """The largest difference of the first token's log probabilities.

    An id that only one side lists is on the other at most as likely as the last that is listed there.
    """
    found = 0.0
    for here, there in ((one.logprobs, other.logprobs), (other.logprobs, one.logprobs)):
        last = min(there.values())
        for token, logprob in here.items():
            apart = abs(logprob - there.get(token, last))
            found = max(found, apart) if math.isfinite(apart) else math.inf
            if not math.isfinite(found):
                return math.inf
    return found


def _equal(one: Run, other: Run) -> Check:
    differences = [difference(a, b) for a, b in zip(one.served, other.served, strict=True)]
    wrong = [number for number, apart in enumerate(differences, 1) if not apart < DIFFERENCE_MAX]
    found = f"largest difference of a log probability {max(differences):.1e}, limit {DIFFERENCE_MAX:.0e}"
    if wrong:
        found += f"; above it: request {', '.join(map(str, wrong))}"
    return Check(f"outputs of '{other.title}' equal those of '{one.title}'", not wrong, found)


def _closed(number: int, run: Run) -> Check:
    """A side that left no report did not close."""
    lines = [side.text for side in run.closed if not side.clean]
    lines += [f"{side} side: no close report" for side in SIDES if side not in [c.side for c in run.closed]]
    return Check(f"run {number} closed clean", not lines, "\n".join(lines) or "both sides, nothing kept")


def as_plain(runs: Sequence[Run], verdict: Verdict, *, block_tokens: int) -> dict[str, Any]:
    """Plain data; times in seconds."""
    checks = [*verdict.outcomes, *verdict.closes]
    return {
        "ok": all(check.ok for check in checks),
        "runs": [_plain_run(run, block_tokens) for run in runs],
        "checks": [{"what": check.what, "ok": check.ok, "found": check.found} for check in checks],
    }


def _plain_run(run: Run, block_tokens: int) -> dict[str, Any]:
    loaded, disk = run.loaded_tokens(block_tokens), run.disk_tokens(block_tokens)
    return {
        "title": run.title,
        "requests_count": len(run.served),
        "phases_s": run.phases_s,
        "ttft_s": {"p50": run.ttft_s(50), "p95": run.ttft_s(95)},
        "tokens": {
            "prompt": run.prompt_tokens,
            "computed": run.computed_tokens,
            "device": run.cached_tokens - loaded,
            "host": loaded - disk,
            "disk": disk,
        },
        "hit_rate": run.hit_rate,
        "counts": run.counts,
        "closed": {side.side: side.tree for side in run.closed},
        "requests": [
            {"ttft_s": s.ttft_s, "prompt_tokens": s.prompt_tokens, "cached_tokens": s.cached_tokens} for s in run.served
        ],
    }


def print_report(runs: Sequence[Run], verdict: Verdict, *, block_tokens: int) -> None:
    console = Console()
    console.print(_table(runs, block_tokens))
    console.print(Text(_in_short(runs), style="bold"), soft_wrap=True)
    for check in (*verdict.outcomes, *verdict.closes):
        mark = Text("ok   " if check.ok else "FAIL ", style="green" if check.ok else "bold red")
        console.print(mark + Text(f"{check.what}: {check.found}"), soft_wrap=True)


def _table(runs: Sequence[Run], block_tokens: int) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, caption="tokens; hits are of prompt tokens")
    table.add_column("run", no_wrap=True)
    for column in ("TTFT p50", "TTFT p95", "computed", "device", "host", "disk", "hits"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("closed", no_wrap=True)
    for number, run in enumerate(runs, 1):
        loaded, disk = run.loaded_tokens(block_tokens), run.disk_tokens(block_tokens)
        tokens = (run.computed_tokens, run.cached_tokens - loaded, loaded - disk, disk)
        closed = ("clean" if _closed(number, run).ok else "not clean") if run.kvtier else "-"
        table.add_row(
            f"{number}  {run.title}",
            f"{run.ttft_s(50) * 1000:,.0f} ms",
            f"{run.ttft_s(95) * 1000:,.0f} ms",
            *(f"{count:,}" for count in tokens),
            f"{run.hit_rate:.0%}",
            closed,
        )
    return table


def _in_short(runs: Sequence[Run]) -> str:
    alone, _, warm = runs
    computed = warm.computed_tokens / max(1, alone.computed_tokens)
    sooner = alone.ttft_s(50) / max(1e-9, warm.ttft_s(50))
    return (
        f"\nRun 3 computed {computed:.1%} of the tokens that run 1 computed;"
        f" its first tokens came {sooner:.1f} times as fast (p50).\n"
    )
