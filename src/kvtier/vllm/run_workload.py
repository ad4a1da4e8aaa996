"""Serves a workload with vLLM, one request at a time, in a process of its own.

    python -m kvtier.vllm.run_workload BIRTH JOB

1. What vLLM prints goes to the job's log file; what is to be known goes over the channel.
2. SIGTERM, or end of file on the channel between two requests, ends it early and in good order.
3. vLLM's processes die with their parents: they begin by importing this module.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvtier.runtime.process import Channel, born, die_with_parent
from kvtier.vllm.workload import LOGPROBS, Finished, Job, Prompt, Served, SideClosed, Started, decode_job, encode

_PARENT = "KVTIER_WORKLOAD_PARENT"
# vLLM starts its processes afresh, with this module as `__mp_main__`; without this they outlive a killed parent.
if __name__ == "__mp_main__":
    die_with_parent(int(os.environ[_PARENT]))
if __name__ in ("__main__", "__mp_main__"):
    os.environ[_PARENT] = str(os.getpid())

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # With eager mode on, what is left for torch to compile is small and costs a fresh machine a minute.
    "TORCHDYNAMO_DISABLE": "1",
}

SHUTDOWN_S = 30.0
"""vLLM's own default, 5 s, is often over before the scheduler side was closed."""

COUNTS_EVERY_S = 1.1
"""the connector sends its counters at most once a second, with a step of the engine"""
COUNTS_SETTLE_S = 20.0
"""how long what is still being written may take to reach the lower tiers"""

PING = Prompt([3, 4, 5], 1)
"""shorter than a block: it leaves nothing in any cache"""


def main() -> None:
    birth = born()
    signal.signal(signal.SIGTERM, _end_early)
    job = decode_job(Path(birth.args[0]).read_bytes())
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    # vLLM's sockets and torch's caches go where they are removed, also after a kill.
    os.environ.update(ENVIRONMENT, TMPDIR=job.folder)
    _serve(job, birth.channel)


def _end_early(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def _serve(job: Job, channel: Channel) -> None:
    from vllm import LLM

    select.select([channel], [], [])
    if not channel.receive():
        return
    llm = LLM(model=job.model, **job.engine, **_transfer(job))
    try:
        _generate(llm, job.warm_up)
        before = _counts_after_a_step(llm) if job.kvtier is not None else {}
        channel.send(encode(Started()))
        for prompt in job.prompts:
            channel.receive()
            if channel.closed_by_peer:
                return
            channel.send(encode(_generate(llm, prompt)))
        after = _counts(llm) if job.kvtier is not None else {}
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)
    counts = {name: value - before.get(name, 0) for name, value in after.items()}
    channel.send(encode(Finished(counts, _reports(Path(job.reports)))))


def _transfer(job: Job) -> Mapping[str, Any]:
    if job.kvtier is None:
        return {}
    config = {
        "kv_connector": "WatchedConnector",
        "kv_connector_module_path": "kvtier.vllm.watched",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvtier": job.kvtier, "close_reports": job.reports},
    }
    return {"kv_transfer_config": config}


def _generate(llm: Any, prompt: Prompt) -> Served:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=prompt.output_tokens, ignore_eos=True, logprobs=LOGPROBS, detokenize=False
    )
    output = llm.generate([{"prompt_token_ids": prompt.tokens}], params, use_tqdm=False)[0]
    answer = output.outputs[0]
    return Served(
        ttft_s=output.metrics.first_token_latency,
        prompt_tokens=len(prompt.tokens),
        cached_tokens=output.num_cached_tokens or 0,
        tokens=list(answer.token_ids),
        logprobs={token: entry.logprob for token, entry in answer.logprobs[0].items()},
    )


def _counts(llm: Any) -> dict[str, int]:
    """kvtier's counters, once they have stopped growing: by then all that was stored is in the lower tiers too."""
    deadline = time.monotonic() + COUNTS_SETTLE_S
    last, counts = None, _counts_after_a_step(llm)
    while counts != last and time.monotonic() < deadline:
        last, counts = counts, _counts_after_a_step(llm)
    return counts


def _counts_after_a_step(llm: Any) -> dict[str, int]:
    from prometheus_client import REGISTRY

    time.sleep(COUNTS_EVERY_S)
    _generate(llm, PING)
    # Of this registry vLLM's own `get_metrics` shows what begins with "vllm:".
    return {
        family.name.removeprefix("kvtier_"): int(sample.value)
        for family in REGISTRY.collect()
        for sample in family.samples
        if family.type == "counter" and sample.name.startswith("kvtier_") and sample.name.endswith("_total")
    }


def _reports(path: Path) -> list[SideClosed]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=SideClosed) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    main()
