"""Writes `docs/states.md` from the tables in `kvtier.core.tables`: `python docs/make_states.py`."""

from __future__ import annotations

from pathlib import Path

from kvtier.core.tables import SLOT_MOVES, STORE_MOVES, TRANSFER_MOVES

PAGE = Path(__file__).with_name("states.md")

_HEAD = """<!-- Made by docs/make_states.py from src/kvtier/core/tables.py; change that and run it again. -->

# States

What kvtier's core keeps a state of, and every move between states that exists. A slot becomes free or ready only
through the end of the transfer that holds its lease; an end notice of nothing that is out is counted and ignored.
"""

_TABLES = (
    (
        "A slot of host memory",
        "`ready(n)` has n readers: lookups, loads and demotions that hold a lease on it.",
        SLOT_MOVES,
    ),
    (
        "A transfer",
        "A cancelled transfer is not gone: until its end notice has come, its slots are held.",
        TRANSFER_MOVES,
    ),
    ("The store", "One for each engine, from its opening to its close report.", STORE_MOVES),
)


def page() -> str:
    parts = [_HEAD]
    for title, about, moves in _TABLES:
        rows = "\n".join(f"| {before} | {after} | {why} |" for before, after, why in moves)
        parts.append(f"## {title}\n\n{about}\n\n| from | to | when |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
