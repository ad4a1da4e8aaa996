"""Seeing an engine's cache tensors as pages, whatever their strides."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.transfer.pages import NumpyPages, pages_of


def numbered(*shape: int, dtype: type = np.uint16) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def test_blocks_first_is_one_view_of_the_same_memory() -> None:
    tensor = numbered(5, 3, 7)
    (layer,) = pages_of(tensor)
    assert layer.shape == (5, 42)
    assert [bytes(page) for page in layer] == [block.tobytes() for block in tensor]
    layer[2] = 255
    assert (tensor[2] == 0xFFFF).all()
    assert (tensor[1] == numbered(5, 3, 7)[1]).all()


def test_keys_and_values_in_halves_are_two_views() -> None:
    tensor = numbered(2, 5, 3, 7)
    keys, values = pages_of(tensor, block_axis=1)
    for half, layer in zip(tensor, (keys, values), strict=True):
        assert [bytes(page) for page in layer] == [block.tobytes() for block in half]


def test_blocks_that_lie_apart_keep_their_stride() -> None:
    wide = numbered(5, 64)
    (layer,) = pages_of(wide[:, 8:20])
    assert layer.shape == (5, 24)
    assert layer.strides == (128, 1)
    assert [bytes(page) for page in layer] == [block[8:20].tobytes() for block in wide]


def test_axes_in_another_order_than_memory_are_the_memory_of_a_block() -> None:
    tensor = numbered(5, 3, 7, 2).transpose(0, 2, 1, 3)
    (layer,) = pages_of(tensor)
    assert [bytes(page) for page in layer] == [block.tobytes() for block in numbered(5, 3, 7, 2)]


def test_a_gap_inside_a_block_makes_one_view_a_piece() -> None:
    tensor = numbered(5, 4, 8)[:, :, :6]
    views = pages_of(tensor)
    assert [view.shape for view in views] == [(5, 12)] * 4
    for head, view in enumerate(views):
        assert [bytes(page) for page in view] == [block[head].tobytes() for block in tensor]


def test_blocks_last_in_memory_are_pieces_of_one_element() -> None:
    tensor = numbered(3, 5)
    views = pages_of(tensor, block_axis=-1)
    assert [view.shape for view in views] == [(5, 2)] * 3
    assert bytes(views[1][4]) == tensor[1, 4].tobytes()


@pytest.mark.parametrize("tensor", [numbered(4, 6)[::-1], np.broadcast_to(numbered(6), (4, 6)), numbered(0, 6)])
def test_what_has_no_pages_is_an_error(tensor: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="has no pages"):
        pages_of(tensor)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "float64"])
def test_torch_tensors_share_their_memory(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 5, 3, 16, dtype=getattr(torch, name)).permute(1, 0, 2, 3)
    views = pages_of(tensor)
    assert [view.shape for view in views] == [(5, 48 * tensor.element_size())] * 2
    views[1][3] = 0x3C
    touched = tensor.view(torch.uint8) == 0x3C
    assert touched[3, 1].all()
    assert touched.sum() == 48 * tensor.element_size()


def test_a_tensor_on_a_device_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="meta"):
        pages_of(torch.zeros(4, 4, device="meta"))


def test_layers_must_agree_and_have_contiguous_pages() -> None:
    good = np.zeros((4, 6), np.uint8)
    assert NumpyPages([good, np.zeros((4, 9), np.uint8)]).page_bytes == [6, 9]
    for layers in ([], [good, np.zeros((5, 6), np.uint8)], [good[:, ::2]], [good.astype(np.int8)], [good[0]]):
        with pytest.raises(ConfigError):
            NumpyPages(layers)
