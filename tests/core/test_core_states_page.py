"""docs/states.md says what the tables say, and the core's own names are the ones in the tables."""

from __future__ import annotations

import runpy
from pathlib import Path

from kvtier.core.tables import SLOT_MOVES, STORE_MOVES, TRANSFER_MOVES, Move, Phase, Slot

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_states_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_states.py"))["page"]()
    assert (DOCS / "states.md").read_text() == made, "run: python docs/make_states.py"


def named(moves: tuple[tuple[str, str, str], ...]) -> set[str]:
    return {state.partition("(")[0] for move in moves for state in move[:2]}


def test_the_tables_name_exactly_the_states_that_the_core_has() -> None:
    assert named(SLOT_MOVES) == {state.name.lower() for state in Slot}
    assert named(STORE_MOVES) == set(Phase)
    assert named(TRANSFER_MOVES) == {*Move, "queued", "ended"}, "one that has ended is forgotten"
