"""A process that uses the library until it is killed: `python library_child.py PATH SETTLED_BEFORE`.

It loads what earlier runs had settled and compares all bytes, then stores and loads prompts for ever. Lines:
"tier PID" whenever the tier has come up in a process, "warm BLOCKS", "settled PROMPTS", "round N", "WRONG ...".
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine_bench import BLOCK_TOKENS, Bench, config, disk

from kvtier.engine.tier_port import PortState

BLOCKS = 8
PROMPTS = 24
"""three quarters of them do not fit into host memory"""


def say(*words: object) -> None:
    print(*words, flush=True)


def main(path: str, settled: int) -> None:
    b = Bench(config(disk(Path(path), process=True, name="far"), host="512KiB"))
    pid = 0

    def look() -> None:
        nonlocal pid
        tier = b.port("far")._tier
        if tier is not None and b.port("far").state is PortState.UP and tier.pid != pid:
            pid = tier.pid
            say("tier", pid)

    look()
    say("warm", sum(b.get(BLOCKS, seed) for seed in range(settled)) // BLOCK_TOKENS)
    for seed in range(settled, settled + 4):
        b.put(BLOCKS, seed % PROMPTS)
    if b.cache.settle():
        say("settled", min(settled + 4, PROMPTS))
    n = 0
    while True:
        b.put(BLOCKS, n % PROMPTS)
        b.get(BLOCKS, (n * 7) % PROMPTS)
        b.get(BLOCKS, 1000 + n)
        look()
        n += 1
        say("round", n)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except AssertionError as error:
        say("WRONG", repr(error))
        raise
