"""A toy policy: each sequence attends to its first tokens (sink) and its last ones (window), and to
a running mean of all values so far, which is its slot's state on the device.

Sink and window have pools of their own. Blocks of the window are given back as it moves on, so a
sequence's memory has a hole in the middle. In the mean, tokens that were there when the sequence
was admitted count once and generated ones twice: recomputing a sequence takes the second for the
first, so it is lossy, and swaps are exact only with the slot's state.
"""

from models.config import ModelConfig
from paged.kv_cache.policy import CacheConfig, Capabilities, KVPolicy, Policy, ShardedModel
from tests.paged.kv_cache.sink_window.device import SinkWindowDevice, dense_attend
from tests.paged.kv_cache.sink_window.host import Layout, Options, SinkWindowHost

__all__ = ["SINK_WINDOW", "Options", "dense_attend"]


def check(config: CacheConfig, model: ModelConfig | None) -> None:
    options: Options = config.policy_options
    if options.sink_tokens < 0 or options.sink_tokens % config.page_size:
        raise ValueError(
            f"sink_tokens ({options.sink_tokens}) must be whole pages of {config.page_size} tokens"
        )
    if options.window_tokens < 1:
        raise ValueError(f"window_tokens must be at least 1, not {options.window_tokens}")
    on_host = options.on_host(config)
    if config.preemption_mode != "recompute" and on_host < config.max_num_seqs:
        raise ValueError(
            f"host_sequences ({on_host}) must be at least max_num_seqs ({config.max_num_seqs}), "
            "unless preemption_mode is 'recompute'"
        )
    if model is not None and model.sliding_window is not None:
        raise ValueError("the policy has a window of its own: the model's cannot be served")


def _device(config: CacheConfig, model: ShardedModel, implementation: str | None) -> KVPolicy:
    shard = model.shard
    kv_dtype = None if config.kv_dtype == "auto" else config.kv_dtype
    return SinkWindowDevice(
        Layout.of(config, model), shard.num_layers, shard.num_kv_heads, shard.head_dim,
        config.max_num_seqs, kv_dtype,
    )  # fmt: skip


CAPABILITIES = Capabilities(
    fork="computed", swap=True, chunked_prefill=True, recompute=True, slot_state=True
)
SINK_WINDOW = Policy(lambda config: CAPABILITIES, SinkWindowHost, _device, check, options=Options)
