"""Copies by layer: exactly the bytes of the transfer, for any order of blocks and slots."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import ConfigError, Refused
from kvtier.memory.layout import PageLayout, Rows, plan_layout
from kvtier.transfer import move
from kvtier.transfer.base import SKIP, RankTransfer, Way
from kvtier.transfer.move import Mover
from kvtier.transfer.pages import NumpyPages

from .conftest import BLOCKS, PAGE_BYTES, ROWS, World

ORDERS = {
    "one": [7],
    "adjacent": [2, 3, 4, 5],
    "backwards": [5, 4, 3],
    "scattered": [9, 0, 4, 6, 2],
    "runs and single ones": [1, 2, 3, 8, 0, 6, 7],
}


def block_ids(slots: list[int], engine_blocks: int, step: int) -> list[int]:
    return [(slot * engine_blocks + nth + step) % BLOCKS for slot in slots for nth in range(engine_blocks)]


@pytest.mark.parametrize("slots", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("batch_bytes", [1, 256 << 10])
def test_a_store_writes_its_rows_and_nothing_else(
    slots: list[int], engine_blocks: int, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move, "BATCH_BYTES", batch_bytes)
    world = World(engine_blocks)
    before, pages_before = world.rows.table(0).copy(), [layer.copy() for layer in world.pages.layers]
    blocks = block_ids(slots, engine_blocks, step=3)
    world.mover.move(world.transfer(Way.STORE, blocks, slots))
    expected = before.copy()
    for i, slot in enumerate(slots):
        expected[slot] = world.expected_row(before[slot], blocks[i * engine_blocks : (i + 1) * engine_blocks])
    assert (world.rows.table(0) == expected).all()
    assert all((a == b).all() for a, b in zip(world.pages.layers, pages_before, strict=True))


@pytest.mark.parametrize("slots", ORDERS.values(), ids=ORDERS)
def test_a_load_gives_back_what_was_stored_and_touches_no_other_page(slots: list[int], engine_blocks: int) -> None:
    world = World(engine_blocks)
    stored_from = block_ids(slots, engine_blocks, step=3)
    loaded_to = block_ids(slots, engine_blocks, step=4)[::-1]
    before = [layer.copy() for layer in world.pages.layers]
    world.mover.move(world.transfer(Way.STORE, stored_from, slots))
    rows_before = world.rows.table(0).copy()
    world.mover.move(world.transfer(Way.LOAD, loaded_to, slots))
    for layer, old in zip(world.pages.layers, before, strict=True):
        expected = old.copy()
        expected[loaded_to] = old[stored_from]
        assert (layer == expected).all()
    assert (world.rows.table(0) == rows_before).all()


def test_two_ranks_write_their_own_parts_of_one_row(engine_blocks: int) -> None:
    first = World(engine_blocks, ranks=2, rank=0)
    second = World(engine_blocks, ranks=2, rank=1, array=first.array)
    before = first.rows.table(0).copy()
    slots, blocks = [8, 1], block_ids([8, 1], engine_blocks, step=0)
    for world in (first, second):
        world.mover.move(world.transfer(Way.STORE, blocks, slots))
    expected = before.copy()
    for i, slot in enumerate(slots):
        own = blocks[i * engine_blocks : (i + 1) * engine_blocks]
        expected[slot] = second.expected_row(first.expected_row(before[slot], own), own)
    assert (first.rows.table(0) == expected).all()
    payload = first.page_layout.payload_bytes
    assert payload == 2 * engine_blocks * sum(PAGE_BYTES)
    assert (expected[:, payload:] == before[:, payload:]).all()  # padding is nobody's


@pytest.mark.parametrize("direction", list(Way))
@pytest.mark.parametrize(
    ("size_class", "blocks", "slots"),
    [
        (1, [0], [0]),
        (-1, [0], [0]),
        (0, [BLOCKS], [0]),
        (0, [-2], [0]),
        (0, [0], [ROWS]),
        (0, [0], [-1]),
        (0, [0, 1], [0]),
        (0, [], []),
    ],
)
def test_what_does_not_exist_is_refused(direction: Way, size_class: int, blocks: list[int], slots: list[int]) -> None:
    with pytest.raises(Refused, match="transfer 9"):
        World(1).mover.check(RankTransfer(9, direction, size_class, blocks, slots))


def test_the_last_block_and_the_last_slot_are_not_refused() -> None:
    World(1).mover.check(RankTransfer(9, Way.LOAD, 0, [BLOCKS - 1, 0], [ROWS - 1, 0]))


def test_pages_must_fit_the_layout() -> None:
    pages = NumpyPages([np.zeros((4, 4096), np.uint8)])
    layout = plan_layout(8192, [4096])
    rows = Rows(np.zeros(8192, np.uint8), layout)
    Mover([pages], [PageLayout(1, 1, [4096])], rows)
    for page_sets, page_layouts, rank in (
        ([], [], 0),
        ([pages], [PageLayout(1, 1, [4095])], 0),
        ([pages], [PageLayout(2, 1, [4096])], 0),
        ([pages], [PageLayout(1, 1, [4096])], 1),
    ):
        with pytest.raises(ConfigError):
            Mover(page_sets, page_layouts, rows, rank=rank)


def test_size_classes_have_pages_of_their_own() -> None:
    layout = plan_layout(4 * 12288, [4096, 5000])
    rows = Rows(np.zeros(layout.size_bytes, np.uint8), layout)
    sets = [NumpyPages([np.full((3, size), i + 1, np.uint8)]) for i, size in enumerate((4096, 5000))]
    mover = Mover(sets, [PageLayout(1, 1, s.page_bytes) for s in sets], rows)
    mover.move(RankTransfer(1, Way.STORE, 1, [2], [3]))
    assert not rows.table(0).any()
    assert (rows.table(1)[3, :5000] == 2).all()
    assert rows.table(1).sum() == 2 * 5000


def test_a_load_leaves_out_the_pages_that_the_device_has(engine_blocks: int) -> None:
    world = World(engine_blocks)
    slots = [1, 2, 3]
    stored_from = block_ids(slots, engine_blocks, step=3)
    loaded_to = block_ids(slots, engine_blocks, step=4)[::-1]
    world.mover.move(world.transfer(Way.STORE, stored_from, slots))
    before = [layer.copy() for layer in world.pages.layers]
    skipped = [SKIP, *loaded_to[1:]]
    transfer = world.transfer(Way.LOAD, skipped, slots)
    world.mover.check(transfer)
    world.mover.move(transfer)
    for layer, old in zip(world.pages.layers, before, strict=True):
        expected = old.copy()
        expected[loaded_to[1:]] = old[stored_from[1:]]
        assert (layer == expected).all()


def test_a_load_of_nothing_but_left_out_pages_and_a_store_with_one() -> None:
    world = World(1)
    nothing = world.transfer(Way.LOAD, [SKIP, SKIP], [0, 1])
    world.mover.check(nothing)
    before = [layer.copy() for layer in world.pages.layers]
    world.mover.move(nothing)
    assert all((a == b).all() for a, b in zip(world.pages.layers, before, strict=True))
    with pytest.raises(Refused, match="engine block"):
        world.mover.check(world.transfer(Way.STORE, [SKIP, 1], [0, 1]))
