"""Tensor parallelism (vLLM §4.6): the step on several devices, under one block manager.

All shards run the same step on the same inputs and block tables. As in Megatron, each shard has
some query heads, their KV heads with the pages, and a share of the MLP. Two all-reduces a layer,
after 'wo' and 'w_down', complete the hidden states. Other collectives are needed in two cases only:
shards share a KV head whose queries select pages or tokens (kv_cache/shared_heads.py), or a token's
activations are quantised with one scale (models/w8a8.py). Embeddings, logits and sampling are not
split: every shard computes them in full, and samples the same tokens.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.common import ALONE, Reduce
from models.config import ModelConfig
from models.families import family
from models.params import Param, is_param, partition_spec
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.shared_heads import AXIS

SPLIT = PartitionSpec(AXIS)  # the shards' parts, concatenated along axis 0
SPLIT_UNITS = PartitionSpec(None, AXIS)  # exported units or slots [C, x, ...], split along x
REPLICATED = PartitionSpec()  # the same on every shard
# Caches jitted functions by hashable arguments: equal engines of a process share compiled programs.
# The cache is small, because each compiled step takes some 16 MB.
shared = functools.lru_cache(maxsize=8)
RULES = {"heads": AXIS, "kv_heads": AXIS, "mlp": AXIS}  # parameter axis -> mesh axis


class Shards:
    """The first `size` devices, over which model `whole` is split; for size 1, the default device.

    model: one shard's part. With fewer KV heads than shards, each KV head is on several shards.
    devices: JAX's devices by default. Other devices can be passed to compile for them.
    head_order: [L, K] KV head at each place, with its query heads; None for the model's own order.

    Objects are compared by value. Raises ValueError for too few devices, or without an even split.
    """

    def __init__(
        self, whole: ModelConfig, size: int = 1, devices: Sequence[jax.Device] | None = None,
        dtype="float32", head_order: np.ndarray | None = None,
    ):  # fmt: skip
        self.sharded = ShardedModel.split(whole, size, dtype)
        devices = jax.devices() if devices is None else devices
        if size > len(devices):
            raise ValueError(
                f"tensor_parallel ({size}) needs as many devices; JAX sees {len(devices)}"
            )
        self.size = size
        self.model = self.sharded.shard
        self._head_order = head_order
        self.platform = devices[0].platform
        self._whole = whole
        self._mesh = Mesh(np.array(devices[:size]), (AXIS,))
        order = None if head_order is None else head_order.tobytes()
        self._key = whole, size, tuple(devices[:size]), self.sharded.dtype, order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def place(self, params):
        """Place the parameters of the whole model, as declared, on the devices. A parameter that
        `place_one` has placed stays where it is."""
        declaration = family(self._whole).declare(self._whole)
        placed = jax.tree.map(self.place_one, declaration, params, is_leaf=is_param)
        if self._head_order is not None:
            layers = zip(declaration["layers"], placed["layers"], self._head_order, strict=True)
            placed["layers"] = [
                {name: self._ordered(declared[name], x, order) for name, x in layer.items()}
                for declared, layer, order in layers
            ]
        return placed

    def _ordered(self, param: Param, x: jax.Array, order: np.ndarray) -> jax.Array:
        """`x` with its heads in the policy's order, split as before."""
        x = _in_order(param.axes, x, order)
        return x if self.size == 1 else jax.device_put(x, self._sharding(param))

    def place_layers(self, param: Param, x: np.ndarray) -> jax.Array:
        """Place a parameter's stack of all layers [L, ...], as `place` places each layer."""
        if self._head_order is not None:
            layers = zip(x, self._head_order, strict=True)
            x = np.stack([_in_order(param.axes[1:], each, order) for each, order in layers])
        return self.place_one(param, x)

    def place_whole(self, x: np.ndarray) -> jax.Array:
        """Place a copy of `x` on every shard."""
        return jnp.asarray(x) if self.size == 1 else jax.device_put(x, self._named(REPLICATED))

    def place_one(self, param: Param, x) -> jax.Array:
        """Place one parameter. `checkpoint.load` can place each parameter as it is read."""
        if self.size == 1:
            return jnp.asarray(x)
        K, shape = self._whole.num_kv_heads, x.shape
        if "kv_heads" in param.axes and self.size > K and shape == param.shape:
            axis = param.axes.index("kv_heads")
            by_head = x.reshape(*shape[:axis], K, -1, *shape[axis + 1 :])
            x = by_head.repeat(self.size // K, axis).reshape(*shape[:axis], -1, *shape[axis + 1 :])
        return jax.device_put(x, self._sharding(param))

    def _named(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh, spec)

    def _sharding(self, param: Param) -> NamedSharding:
        return self._named(partition_spec(param, RULES))

    def declared_specs(self, declaration):
        """Partition specs of parameters with the declared layout."""
        return jax.tree.map(lambda p: partition_spec(p, RULES), declaration, is_leaf=is_param)

    def abstract_params(self, dtype):
        """The result of `place` for parameters in `dtype`, as `ShapeDtypeStruct`s."""
        return self.abstract_declared(family(self._whole).declare(self._whole), dtype)

    def abstract_declared(self, declaration, dtype):
        """The parameters of `declaration` in `dtype`, as in `abstract_params`."""
        copies = max(1, self.size // self._whole.num_kv_heads)

        def abstract(param: Param):
            sizes = zip(param.shape, param.axes, strict=True)
            shape = tuple(n * (copies if axis == "kv_heads" else 1) for n, axis in sizes)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(param))

        return jax.tree.map(abstract, declaration, is_leaf=is_param)

    def abstract(self, tree, spec: PartitionSpec):
        """`ShapeDtypeStruct`s of a tree of arrays that are split by `spec`."""
        sharding = self._named(spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def specs(self, params):
        """Partition specs of placed parameters."""
        return jax.tree.map(lambda x: getattr(x.sharding, "spec", REPLICATED), params)

    def number(self):
        """This shard's index, inside a function that `jit` made."""
        return jnp.int32(0) if self.size == 1 else jax.lax.axis_index(AXIS)

    @property
    def reduce(self) -> Reduce:
        """Sum and maximum over all shards, for the model's `reduce` argument."""
        if self.size == 1:
            return ALONE
        return Reduce(lambda y: jax.lax.psum(y, AXIS), lambda x: jax.lax.pmax(x, AXIS))

    def jit(self, function: Callable, in_specs, out_specs, donate_argnums=()) -> jax.stages.Wrapped:
        """Jit `function` to run on each shard.

        in_specs, out_specs: partition specs of arguments and results, as in `jax.shard_map`.
        """
        if self.size > 1:
            # All shards compute the same replicated values, but check_vma cannot prove this through
            # loops.
            function = jax.shard_map(
                function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        return jax.jit(function, donate_argnums=donate_argnums)


def _in_order(axes: tuple[str, ...], x, order: np.ndarray):
    """`x`, of NumPy or JAX, with heads reordered on its axes 'heads' and 'kv_heads'."""
    for axis, name in enumerate(axes):
        if name in ("heads", "kv_heads"):
            shape = x.shape
            by_head = x.reshape(*shape[:axis], len(order), -1, *shape[axis + 1 :])
            x = by_head.take(order, axis=axis).reshape(shape)
    return x
