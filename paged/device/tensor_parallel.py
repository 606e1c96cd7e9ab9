"""Tensor parallelism (vLLM §4.6): the step on several devices, under one block manager.

All shards run the same step on the same inputs and block tables. Megatron's splits give each of
them some query heads with their KV heads, the pages of these, and a share of the MLP. Two
all-reduces a layer, after 'wo' and 'w_down', complete the hidden states; nothing else travels.
Embeddings, logits and sampling are not split: every shard does them in full, and samples the same
tokens.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.families import family
from models.params import Param, is_param, partition_spec

AXIS = "tp"
SPLIT = PartitionSpec(AXIS)  # each shard's own, one after the other along the first axis
SPLIT_BLOCKS = PartitionSpec(None, AXIS)  # blocks [C, ...] on their way, of each shard's pages
WHOLE = PartitionSpec()  # the same on every shard
RULES = {"heads": AXIS, "kv_heads": AXIS, "mlp": AXIS}  # of the parameters' axes


class Shards:
    """The first `size` devices, among which `whole` is spread; of size 1, the default device.

    model: what one shard computes. With fewer KV heads than shards each is on several of them.
    devices: JAX's by default; others to compile for.

    Raises ValueError where there are too few devices or no even split.
    """

    def __init__(
        self, whole: ModelConfig, size: int = 1, devices: Sequence[jax.Device] | None = None
    ):
        H, K, F = whole.num_heads, whole.num_kv_heads, whole.intermediate_size
        for name, count in (("num_heads", H), ("intermediate_size", F)):
            if count % size:
                raise ValueError(f"tensor_parallel ({size}) must divide {name} ({count})")
        if K % size and size % K:
            raise ValueError(
                f"tensor_parallel ({size}) must divide num_kv_heads ({K}) or be a multiple of it"
            )
        devices = jax.devices() if devices is None else devices
        if size > len(devices):
            raise ValueError(
                f"tensor_parallel ({size}) needs as many devices; JAX sees {len(devices)}"
            )
        self.size = size
        self.model = whole.replace(
            num_heads=H // size, num_kv_heads=max(1, K // size), intermediate_size=F // size
        )
        self.platform = devices[0].platform
        self._whole = whole
        self._mesh = Mesh(np.array(devices[:size]), (AXIS,))

    def place(self, params):
        """Parameters of the whole model, as declared, on the devices that need them. What
        `place_one` has put there stays."""
        declaration = family(self._whole).declare(self._whole)
        return jax.tree.map(self.place_one, declaration, params, is_leaf=is_param)

    def place_one(self, param: Param, x) -> jax.Array:
        """One of them: what `checkpoint.load` can do with each as it reads it."""
        if self.size == 1:
            return jnp.asarray(x)
        K, D = self._whole.num_kv_heads, self._whole.head_dim
        if "kv_heads" in param.axes and self.size > K and x.shape == param.shape:
            by_head = x.reshape(K, D, *x.shape[1:])
            x = by_head.repeat(self.size // K, axis=0).reshape(-1, *x.shape[1:])
        return jax.device_put(x, self._sharding(param))

    def _sharding(self, param: Param) -> NamedSharding:
        return NamedSharding(self._mesh, partition_spec(param, RULES))

    def abstract_params(self, dtype):
        """What `place` gives for parameters in `dtype`, as `ShapeDtypeStruct`s."""
        copies = max(1, self.size // self._whole.num_kv_heads)

        def abstract(param: Param):
            first, *rest = param.shape
            shape = first * (copies if "kv_heads" in param.axes else 1), *rest
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(param))

        declaration = family(self._whole).declare(self._whole)
        return jax.tree.map(abstract, declaration, is_leaf=is_param)

    def abstract(self, tree, spec: PartitionSpec):
        """`ShapeDtypeStruct`s of arrays that lie on the shards as `spec` says."""
        sharding = NamedSharding(self._mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def specs(self, params):
        """How placed parameters are split."""
        return jax.tree.map(lambda x: getattr(x.sharding, "spec", WHOLE), params)

    def reduce(self, y):
        """The sum of what all shards give: the seam of models/common.py."""
        return y if self.size == 1 else jax.lax.psum(y, AXIS)

    def jit(self, function: Callable, in_specs, out_specs, donate_argnums=()) -> jax.stages.Wrapped:
        """`function` as each shard runs it, compiled; the specs are of its arguments and results,
        as `jax.shard_map` takes them."""
        if self.size > 1:
            # What the shards have in common they compute alike, which the check would have to see
            # through their loops.
            function = jax.shard_map(
                function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        return jax.jit(function, donate_argnums=donate_argnums)
