"""Clusters of engines: in simulated time, on JAX's devices, or in Ray actors."""

from functools import partial
from typing import Any

import jax

from experiments.lib.engines import check_implementation, keep_compilations, load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags
from models import checkpoint
from models.config import ModelConfig
from paged.cluster.live import LiveCluster
from paged.cluster.ray_actors import RayRunner, import_ray
from paged.cluster.simulated import SimulatedCluster
from paged.cluster.threads import ThreadRunner
from paged.config import EngineConfig
from paged.engine import Engine
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.step_cost import StepCost
from paged.tensor_parallel import Shards


def uuids(count: int) -> list[str]:
    return [f"gpu-{i:02}" for i in range(count)]


def simulated(
    model: ModelConfig, config: EngineConfig, cost: StepCost, count: int, dtype: str = "float32",
    rebalance_s: float = 10.0, keep_outputs: bool = True,
) -> SimulatedCluster:  # fmt: skip
    """A cluster of engines on simulated devices, with the step times of `cost`."""
    engines = {
        uuid: Engine(
            model, config,
            SimulatedExecutor(
                cost, vocab_size=model.vocab_size, dtype=dtype, adapter_page_s=cost.adapter_page_s
            ),
        )
        for uuid in uuids(count)
    }  # fmt: skip
    return SimulatedCluster(
        engines, model, config, rebalance_s=rebalance_s, keep_outputs=keep_outputs
    )


def threads(
    flags: ModelFlags, model: ModelConfig, config: EngineConfig, count: int, tokenizer=None,
    rebalance_s: float = 10.0,
) -> LiveCluster:  # fmt: skip
    """A cluster of engines, one on each of `count` JAX devices. tokenizer: None if outputs need no
    text. Raises ValueError if there are fewer devices."""
    devices = jax.devices()[:count]
    if len(devices) < count:
        raise ValueError(f"{count} engines need as many devices: JAX sees {len(devices)}")
    implementation = flags.attention_implementation or None
    check_implementation(flags.attention_implementation, config, Shards(model, dtype=flags.dtype))
    keep_compilations(flags.compilation_cache)
    _, params = checkpoint.load(flags.model, flags.dtype)

    def make_engine(device: jax.Device) -> Engine:
        own = jax.device_put(params, device)
        engine = Engine.from_model(own, model, config, tokenizer, implementation)
        engine.warm_up(progress=False)
        return engine

    runners = {
        uuid: ThreadRunner(partial(make_engine, device), device)
        for uuid, device in zip(uuids(count), devices, strict=True)
    }
    return LiveCluster(
        runners, model, config, tokenizer, rebalance_s=rebalance_s, dtype=flags.dtype
    )


def warm_engine(config: EngineConfig, values: dict[str, Any]) -> Engine:
    """The engine of a Ray actor. values: keyword arguments of `load_engine`."""
    engine = load_engine(config, **values)
    engine.warm_up(progress=False)
    return engine


def ray_actors(
    flags: ModelFlags, model: ModelConfig, config: EngineConfig, count: int, tokenizer=None,
    rebalance_s: float = 10.0,
) -> LiveCluster:  # fmt: skip
    """A cluster of engines in Ray actors, each with a GPU if the Ray cluster has any. Raises
    ImportError, naming the extra, if Ray is not installed."""
    ray = import_ray()
    ray.init(include_dashboard=False, log_to_driver=False)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    make_engine = partial(warm_engine, config, loading(flags))
    wanted: dict[str, Any] = {"num_gpus": 1} if has_gpus else {"num_cpus": 0}
    runners = {uuid: RayRunner(make_engine, wanted) for uuid in uuids(count)}
    return LiveCluster(
        runners, model, config, tokenizer, rebalance_s=rebalance_s, dtype=flags.dtype
    )
