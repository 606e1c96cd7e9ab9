"""Declarations of parameters, used for initialisation, abstract shapes, sharding and loading."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Param:
    """Declares one parameter.

    axes:    a logical name for each dimension. `partition_spec` maps the names to mesh axes.
    init:    'normal' (standard deviation `fan_in ** -0.5`), 'embed' (0.02), 'ones' or 'zeros'.
    hf_name: the tensor's name in a Hugging Face checkpoint.
    transpose: whether the checkpoint's tensor is [in, out]; parameters are [out, in].
    part: (first, n) if the checkpoint's tensor fuses several parameters, such as queries, keys and
        values. After transposing, the tensor has n rows, and this parameter begins at row `first`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str
    hf_name: str
    transpose: bool = False
    part: tuple[int, int] | None = None

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), self

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        shape = (self.part[1] if self.part else self.shape[0], *self.shape[1:])
        return shape[::-1] if self.transpose else shape

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """This parameter, in its declared shape, as a view into the checkpoint's tensor."""
        tensor = tensor.T if self.transpose else tensor
        if self.part is None:
            return tensor
        first = self.part[0]
        return tensor[first : first + self.shape[0]]


def is_param(x) -> bool:
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
            scale = param.shape[-1] ** -0.5
            return (scale * jax.random.normal(key, param.shape)).astype(dtype)
    raise AssertionError(f"unknown init {param.init!r}")


def init(declaration, key, dtype=jnp.float32):
    """Random parameters: a pytree of arrays with the declaration's structure."""
    leaves, treedef = jax.tree.flatten(declaration, is_leaf=is_param)
    keys = jax.random.split(key, len(leaves))
    values = [_init_one(p, k, dtype) for p, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, values)


def abstract(declaration, dtype=jnp.float32):
    """`jax.ShapeDtypeStruct`s of the parameters, for tracing and compiling without weights."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, dtype), declaration, is_leaf=is_param
    )


def stack(params):
    """The parameters with the layers as one dict of arrays [L, ...] instead of a list of dicts."""
    return params | {"layers": jax.tree.map(lambda *each: jnp.stack(each), *params["layers"])}


def partition_spec(param: Param, rules: Mapping[str, str | None]) -> PartitionSpec:
    """The mesh axes that split the parameter's dimensions.

    rules: logical axis -> mesh axis. Axes without a rule are not split.
    """
    return PartitionSpec(*(rules.get(axis) for axis in param.axes))


def flatten(declaration) -> dict[str, Param]:
    """The declaration as {'layers.0.wq': Param, ...}."""
    leaves = jax.tree_util.tree_leaves_with_path(declaration, is_leaf=is_param)
    return {jax.tree_util.keystr(path, simple=True, separator="."): p for path, p in leaves}
