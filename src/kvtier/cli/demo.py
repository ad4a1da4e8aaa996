"""`kvtier demo`: real vLLM serves one workload three times, each time in new processes.

    1  vLLM alone: what its own device cache does not hold is computed again
    2  with kvtier, nothing stored yet: what the device cache had to give up comes back from host memory
    3  with kvtier, started again: the prompts come back from disk

The three runs have the same model (random weights, made here), the same engine settings and an equally small device
cache. All that is written lies in one temporary folder, which is gone at the end, as are all processes, also after
Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvtier.cli import exits
from kvtier.cli.demo_child import WorkloadProcess
from kvtier.cli.demo_report import Run, as_plain, judge, print_report
from kvtier.replay.trace import TraceRequest, conversations, fill_in, read_trace, seen_before
from kvtier.testing.tiny_model import make_checkpoint
from kvtier.vllm.workload import Job, Prompt, Served

TITLES = ("vLLM alone", "kvtier, cold", "kvtier, warm")

# Computing a prompt of 4,000 tokens takes seconds on two cores; its KV is 16 MiB.
LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 4, 512, 8, 2, 2048
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * (HIDDEN // HEADS) * 4

BLOCK_TOKENS = 64
PROMPT_TOKENS_MAX = 4608
OUTPUT_TOKENS_MAX = 8
CONTEXT_TOKENS = PROMPT_TOKENS_MAX + BLOCK_TOKENS
DEVICE_BLOCKS = CONTEXT_TOKENS * 3 // 2 // BLOCK_TOKENS
"""room for one long prompt and a half: a conversation that waits for its next turn loses its place"""
HOST_BYTES = 256 << 20
DISK_BYTES_MIN = 256 << 20

PHASES = ("start", "serve", "end")

TRACE_REQUESTS = 16
"""of a trace, where `--requests` does not say"""


def demo_command(
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Serve this trace (JSON lines in Mooncake's format) instead of a made one."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help=f"Serve at most so many requests; {TRACE_REQUESTS} of a trace."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Serve one workload with vLLM alone, with kvtier, and again after a restart; compare times and outputs."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    prompts = make_prompts(trace, requests)
    with _terminating_as_an_interrupt(), tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        runs = serve_three_times(Path(folder), prompts)
    repeated = sum(seen_before([p.tokens for p in prompts], unit=BLOCK_TOKENS))
    verdict = judge(runs, repeated_tokens=repeated, block_tokens=BLOCK_TOKENS)
    if as_json:
        plain = as_plain(runs, verdict, block_tokens=BLOCK_TOKENS)
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(plain)) + b"\n")
    else:
        print_report(runs, verdict, block_tokens=BLOCK_TOKENS)
    if not all(check.ok for check in verdict.outcomes):
        raise typer.Exit(exits.PROBLEM)
    if not all(check.ok for check in verdict.closes):
        raise typer.Exit(exits.UNCLEAN)


def make_prompts(trace: Path | None, requests: int | None) -> list[Prompt]:
    """A trace's first requests, or three conversations of four turns, whose last prompts are nearly the longest that
    are served; longer ones are cut."""
    found: Sequence[TraceRequest]
    if trace is not None:
        found = read_trace(trace, requests_max=requests or TRACE_REQUESTS)
    else:
        found = conversations(count=3, turns=4, turn_blocks=2, output_tokens=OUTPUT_TOKENS_MAX, seed=1)[:requests]
    return [
        Prompt(
            fill_in(request, vocab=VOCAB, tokens_max=PROMPT_TOKENS_MAX),
            min(max(request.output_length, 1), OUTPUT_TOKENS_MAX),
        )
        for request in found
    ]


def serve_three_times(folder: Path, prompts: list[Prompt]) -> list[Run]:
    """One run after the other, in processes of their own. Raises TierBroken for one that did not end well."""
    model = make_checkpoint(
        folder / "model",
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=KV_HEADS,
        intermediate=1408,
        vocab=VOCAB,
        positions_max=CONTEXT_TOKENS,
    )
    settings = kvtier_settings(folder / "cache", prompts)
    kvtiers = (None, settings, settings)
    jobs = [make_job(folder, number, model, prompts, kvtier) for number, kvtier in enumerate(kvtiers, 1)]
    runs: list[Run] = []
    with _progress() as progress, ExitStack() as stack:
        tasks = [progress.add_task(title, total=None, start=False) for title in TITLES]
        # A process comes up while the one before it ends, as far as it can without an engine: nothing is measured then.
        processes = (stack.enter_context(WorkloadProcess(job)) for job in jobs)
        process: WorkloadProcess | None = next(processes)
        for title, job, task in zip(TITLES, jobs, tasks, strict=True):
            assert process is not None
            run, process = _serve(title, job, process, processes, progress, task)
            runs.append(run)
    return runs


def kvtier_settings(cache: Path, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A configuration with room for all prompts on disk."""
    stored_bytes = KV_BYTES_PER_TOKEN * sum(len(p.tokens) + p.output_tokens for p in prompts)
    disk = {"type": "disk", "path": str(cache), "size": max(DISK_BYTES_MIN, 2 * stored_bytes)}
    return {"host": {"size": HOST_BYTES}, "tiers": [disk]}


def make_job(folder: Path, number: int, model: Path, prompts: list[Prompt], kvtier: dict[str, Any] | None) -> Job:
    engine = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_batched_tokens": CONTEXT_TOKENS,
        "max_num_seqs": 4,
        "disable_log_stats": False,
        "seed": 0,
    }
    # A trace's ids are far from this one's, so that nothing is shared.
    warm_up = TraceRequest(timestamp=0, input_length=1000, output_length=2, hash_ids=[(1 << 63) - 2, (1 << 63) - 1])
    return Job(
        model=str(model),
        engine=engine,
        prompts=prompts,
        warm_up=Prompt(fill_in(warm_up, vocab=VOCAB, tokens_max=1000), 2),
        kvtier=kvtier,
        folder=str(folder),
        log=str(folder / f"{number}.log"),
        reports=str(folder / f"{number}.closed"),
    )


def _serve(
    title: str,
    job: Job,
    process: WorkloadProcess,
    following: Iterator[WorkloadProcess],
    progress: Progress,
    task: TaskID,
) -> tuple[Run, WorkloadProcess | None]:
    """One run, and the process of the next one, which comes up meanwhile."""
    progress.start_task(task)
    progress.update(task, description=f"{title}: vLLM starts")
    served: list[Served] = []
    moments = [time.monotonic()]
    process.go()
    process.wait_until_up()
    moments.append(time.monotonic())
    progress.update(task, description=title, total=len(job.prompts))
    while len(served) < len(job.prompts):
        served.append(process.next_served())
        progress.advance(task)
    moments.append(time.monotonic())
    progress.update(task, description=f"{title}: vLLM ends")
    upcoming = next(following, None)
    finished = process.wait_until_finished()
    process.close()
    moments.append(time.monotonic())
    progress.update(task, description=title)
    progress.stop_task(task)
    phases = {name: end - begin for name, (begin, end) in zip(PHASES, pairwise(moments), strict=True)}
    return Run(title, job.kvtier is not None, served, finished.counts, finished.closed, phases), upcoming


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def _terminating_as_an_interrupt() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that processes and files go with it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
