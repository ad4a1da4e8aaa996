"""Plays the process that serves a workload, without vLLM: answers that depend on the prompt, counters as told.

KVTIER_PLAYED="RUN:TRICK RUN:TRICK ..."   what run RUN does otherwise
"""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
import time
from pathlib import Path

from kvtier.runtime.process import Birth, Process, born
from kvtier.vllm.workload import GO, Finished, Job, Served, SideClosed, Started, decode_job, encode


def main(birth: Birth) -> None:
    job = decode_job(Path(birth.args[0]).read_bytes())
    run = Path(job.log).stem
    tricks = [word.partition(":")[2] for word in os.environ.get("KVTIER_PLAYED", "").split() if word.startswith(run)]
    Path(job.log).write_text("one line\nthe last line\n")
    if "crash" in tricks:
        sys.exit(7)
    select.select([birth.channel], [], [])
    if birth.channel.receive() != [GO]:
        return
    birth.channel.send(encode(Started()))
    if "hang" in tricks:
        child = Process.start("below", "demo_played_child", args=["sleep"])
        print(f"hangs {os.getpid()} {child.pid}", file=sys.stderr, flush=True)
        time.sleep(600)
    for number, prompt in enumerate(job.prompts):
        logprobs = {prompt.tokens[-1] + rank: -1.0 - rank / 10 for rank in range(20)}
        if "wrong" in tricks and number == 1:
            logprobs = {token: logprob - 0.01 for token, logprob in logprobs.items()}
        cached = len(prompt.tokens) * 9 // 10 if run == "3" else 0
        birth.channel.send(encode(Served(0.1 if run == "3" else 1.0, len(prompt.tokens), cached, [1], logprobs)))
    birth.channel.send(encode(finished(job, run, tricks)))


def finished(job: Job, run: str, tricks: list[str]) -> Finished:
    if job.kvtier is None:
        return Finished({}, [])
    counts = {"loaded_blocks": 10, "loaded_from_tiers_blocks": 9 if run == "3" else 0}
    if "nothing-loaded" in tricks:
        counts = dict.fromkeys(counts, 0)
    closed = [SideClosed(side=side, clean=True, text="clean", tree={"name": side}) for side in ("worker", "scheduler")]
    if "unclean" in tricks:
        closed[0] = SideClosed(side="worker", clean=False, text="worker: running, memory kept", tree={})
    if "no-report" in tricks:
        del closed[1]
    return Finished(counts, closed)


def start_one_more() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    birth = born()
    if birth.args[0] == "sleep":
        time.sleep(600)
    main(birth)
