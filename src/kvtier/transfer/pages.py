"""The engine's blocks in host memory, seen as bytes: one array a layer, one row an engine block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.errors import ConfigError
from kvtier.memory.layout import Bytes

if TYPE_CHECKING:
    import torch


class NumpyPages:
    """Device pages in host memory: `layers[l]` is (num_engine_blocks, page_bytes[l]) uint8.

    A page's bytes are contiguous; pages may lie apart. Borrows the arrays.
    """

    def __init__(self, layers: Sequence[Bytes]) -> None:
        counts = {len(layer) for layer in layers}
        if len(counts) != 1:
            raise ConfigError(f"all layers must have the same number of engine blocks, got {sorted(counts)}")
        for layer in layers:
            if layer.dtype != np.uint8 or layer.ndim != 2 or layer.shape[1] < 1 or layer.strides[1] != 1:
                raise ConfigError(
                    f"a layer must be (engine blocks, page bytes) of uint8 with contiguous pages, "
                    f"got {layer.dtype} {layer.shape} with strides {layer.strides}"
                )
        self.layers = list(layers)
        self.count = counts.pop()

    @property
    def page_bytes(self) -> list[int]:
        return [layer.shape[1] for layer in self.layers]


def pages_of(tensor: torch.Tensor | np.ndarray[Any, Any], *, block_axis: int = 0) -> list[Bytes]:
    """Views of a layer's cache tensor as (engine blocks, page bytes) uint8, sharing its memory.

    One view where a block's bytes lie together; one for each piece where they do not, as with keys and
    values in separate halves: (2, blocks, ...) with `block_axis=1` gives two. Any strides work as long as
    they are positive. Raises ConfigError for those, and for a tensor that is not in host memory.
    """
    array = tensor if isinstance(tensor, np.ndarray) else _as_numpy(tensor)
    if array.size == 0 or any(s <= 0 for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        raise ConfigError(f"a cache tensor of shape {array.shape} and strides {array.strides} has no pages")
    block_axis %= array.ndim
    page_bytes, inside = array.itemsize, {block_axis}
    for axis in sorted((a for a in range(array.ndim) if a != block_axis), key=lambda a: array.strides[a]):
        if array.shape[axis] == 1 or array.strides[axis] == page_bytes:
            page_bytes *= array.shape[axis]
            inside.add(axis)
    outside = [[0] if axis in inside else range(array.shape[axis]) for axis in range(array.ndim)]
    shape, strides = (array.shape[block_axis], page_bytes), (array.strides[block_axis], 1)
    views = []
    for corner in itertools.product(*outside):
        first = array[tuple(slice(i, i + 1) for i in corner)].reshape(1).view(np.uint8)
        views.append(np.lib.stride_tricks.as_strided(first, shape, strides))
    return views


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory and strides under an integer type that numpy has."""
    import torch

    if tensor.device.type != "cpu":
        raise ConfigError(f"a cache tensor on {tensor.device} has no pages in host memory")
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array: np.ndarray[Any, Any] = tensor.detach().view(same_size[tensor.element_size()]).numpy()
    return array
