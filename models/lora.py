"""LoRA adapters as arrays (Punica §2.2): adapters, their pages, and merged models.

An adapter adds xAB to the product of a projection. On the device an adapter's ranks are in pages of
`PAGE_RANKS` ranks, so that adapters of different ranks can share one pool.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from models.checkpoint import cast
from models.config import ModelConfig
from models.families import family
from models.params import Param
from pallas_kernels.lora import PAGE_RANKS

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Lora:
    """An adapter.

    weights: projection -> one entry per layer: (a [R, in], b [R, out]) in float32, or None if the
        layer is not adapted. b includes the scale: alpha / R, or alpha / sqrt(R) with rsLoRA.
        Each pair may have its own R.
    """

    weights: dict[str, list[Pair | None]]

    def rank_of(self, name: str) -> int:
        """The largest rank of a projection over all layers; 0 if it is not adapted."""
        return max((len(pair[0]) for pair in self.weights.get(name, ()) if pair), default=0)

    @property
    def rank(self) -> int:
        return max(map(self.rank_of, self.weights))


def num_pages(rank: int) -> int:
    """The number of pages that `rank` ranks need."""
    return math.ceil(rank / PAGE_RANKS)


def declare(config: ModelConfig, pages: int | None = None) -> dict[str, dict[str, Param]]:
    """The parameters of a pool of N = `pages` pages: {projection: {'a': [L, N, 16, in], 'b':
    [L, N, 16, out]}}. If `pages` is None, the parameters of one page: [L, 16, in] and [L, 16, out].

    Axes have the same names as in the base weights, so that shards split both in the same way.
    """
    layers = family(config).declare(config)["layers"]
    sizes = () if pages is None else (pages,)

    def matrix(width: int, axis: str) -> Param:
        shape = (len(layers), *sizes, PAGE_RANKS, width)
        return Param(shape, ("layer", *["page"] * len(sizes), "rank", axis), "zeros", "")

    declaration = {}
    for name in family(config).PROJECTIONS:
        (fan_out, fan_in), (out_axis, in_axis) = layers[0][name].shape, layers[0][name].axes
        declaration[name] = {"a": matrix(fan_in, in_axis), "b": matrix(fan_out, out_axis)}
    return declaration


def page(lora: Lora, config: ModelConfig, number: int, dtype) -> dict[str, dict[str, np.ndarray]]:
    """Page `number` of an adapter in `dtype`, in the shapes of `declare(config)`.

    Projections without ranks in this page are omitted; unused ranks are zero. Raises ValueError for
    values that `dtype` cannot hold.
    """
    ranks = slice(number * PAGE_RANKS, (number + 1) * PAGE_RANKS)
    content = {}
    for name, declared in declare(config).items():
        if lora.rank_of(name) <= ranks.start:
            continue
        content[name] = {key: np.zeros(param.shape, dtype) for key, param in declared.items()}
        for layer, pair in enumerate(lora.weights[name]):
            for key, matrix in zip(("a", "b"), pair or ()):
                part = cast(matrix[ranks], jnp.dtype(dtype), f"{name}, layer {layer}")
                content[name][key][layer, : len(part)] = part
    return content


def merge(params, lora: Lora):
    """The parameters, with the adapter added to the projections' weights. Layers are a list."""
    layers = [dict(layer) for layer in params["layers"]]
    for name, pairs in lora.weights.items():
        for layer, pair in zip(layers, pairs, strict=True):
            if pair:
                w = np.asarray(layer[name], np.float32) + pair[1].T @ pair[0]
                layer[name] = jnp.asarray(w, layer[name].dtype)
    return params | {"layers": layers}
