"""One declaration per parameter serves initialisation, abstract shapes, sharding and loading."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Param:
    """Declares one parameter.

    shape:   as stored here; parameters of layers carry a leading L.
    axes:    a logical name for each dimension, mapped to mesh axes by `partition_specs`.
    init:    'normal' (standard deviation `fan_in ** -0.5`), 'embed' (0.02), 'ones' or 'zeros'.
    hf_name: the tensor's name in a Hugging Face checkpoint; `{layer}` stands for the layer.
    transpose: whether the checkpoint holds [out, in] where we hold [in, out].
    part: (i, n) if the tensor holds n such parameters side by side in its last axis, this as the
        i-th: GPT-2's fused queries, keys and values.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str
    hf_name: str
    transpose: bool = False
    part: tuple[int, int] | None = None

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), self
        assert not (self.transpose and self.part), self

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layer"

    @property
    def hf_names(self) -> list[str]:
        """The tensors of a checkpoint that make up this parameter, by layer if it is stacked."""
        if not self.stacked:
            return [self.hf_name]
        return [self.hf_name.format(layer=layer) for layer in range(self.shape[0])]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of each of these tensors."""
        shape = self.shape[1:] if self.stacked else self.shape
        if self.part is not None:
            return *shape[:-1], shape[-1] * self.part[1]
        return shape[::-1] if self.transpose else shape

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """What of one of these tensors is this parameter, as shaped here; shares its memory."""
        if self.part is not None:
            return np.split(tensor, self.part[1], axis=-1)[self.part[0]]
        return tensor.T if self.transpose else tensor


def _is_param(x) -> bool:
    return isinstance(x, Param)


def _init_one(param: Param, key, dtype):
    match param.init:
        case "ones":
            return jnp.ones(param.shape, dtype)
        case "zeros":
            return jnp.zeros(param.shape, dtype)
        case "embed":
            return (0.02 * jax.random.normal(key, param.shape)).astype(dtype)
        case "normal":
            scale = param.shape[-2] ** -0.5
            return (scale * jax.random.normal(key, param.shape)).astype(dtype)
    raise AssertionError(f"unknown init {param.init!r}")


def init(declaration, key, dtype=jnp.float32):
    """Random parameters, a pytree of arrays in the declaration's structure."""
    leaves, treedef = jax.tree.flatten(declaration, is_leaf=_is_param)
    keys = jax.random.split(key, len(leaves))
    values = [_init_one(p, k, dtype) for p, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, values)


def abstract(declaration, dtype=jnp.float32):
    """`jax.ShapeDtypeStruct`s of the parameters: for tracing and compiling without weights."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, dtype), declaration, is_leaf=_is_param
    )


def unstack(params):
    """Parameters with a list of one dict a layer for their `layers`, which are stacked."""
    names = params["layers"].keys()
    by_layer = zip(*(jnp.unstack(params["layers"][name]) for name in names), strict=True)
    return params | {"layers": [dict(zip(names, layer)) for layer in by_layer]}


def partition_specs(declaration, rules: Mapping[str, str | None]):
    """`PartitionSpec`s from logical axes; an axis that `rules` does not name is replicated."""
    return jax.tree.map(
        lambda p: PartitionSpec(*(rules.get(a) for a in p.axes)), declaration, is_leaf=_is_param
    )


def flatten(declaration) -> dict[str, Param]:
    """The declaration as {'layers.wq': Param, ...}."""
    leaves = jax.tree_util.tree_leaves_with_path(declaration, is_leaf=_is_param)
    return {".".join(str(k.key) for k in path): param for path, param in leaves}
