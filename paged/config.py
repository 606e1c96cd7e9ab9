"""The configuration of an engine."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.lora import num_pages
from paged import checks
from paged.checks import described
from paged.kv_cache import NAMES, policy_of
from paged.kv_cache.policy import CacheConfig, NoOptions, Parts
from paged.requests.sampling_params import MAX_SEQUENCES
from pallas_kernels.lora import PAGE_RANKS

STEP_TOKENS = 512
MAX_STEP_TOKENS = 2**20
MAX_MULTI_STEP = 1024
MAX_ADAPTER_SLOTS = 4096
MAX_ADAPTER_RANK = 1024
MAX_HOST_BYTES = 4 * 2**30  # some 900 sequences of a million tokens in pages of 16


@dataclass(frozen=True)
class EngineConfig(CacheConfig):
    """The configuration of an engine's memory, steps, policy and adapters.

    Raises ValueError for values of the wrong type, and for values that cannot work, alone or in
    combination.
    """

    max_num_seqs: int = described(32, "sequences that run at once", least=1, most=MAX_SEQUENCES)
    max_num_batched_tokens: int = described(
        0,
        f"most tokens of one step; 0: the largest of {STEP_TOKENS}, max_num_seqs, and "
        "max_model_len for whole prompts, or else the policy's prefill tile beside decodes",
        least=0,
        most=MAX_STEP_TOKENS,
    )
    max_prefills_per_step: int = described(
        8, "prompts that are prefilled in one step", least=1, most=MAX_SEQUENCES
    )
    max_model_len: int = described(
        2048, "longest sequence in tokens, prompt and output together", least=2, below=2**31
    )
    chunked_prefill: bool = described(
        True,
        "whether a prompt may be split over steps; off for policies that need whole prompts, and "
        "if a step holds the longest prompt, but no prefill tile of the policy beside other tokens",
    )
    page_size: int = described(16, "tokens of a KV page", least=1, below=2**31)
    kv_cache_tokens: int = described(
        32_768,
        "memory of all KV pages, in tokens of kv_dtype; quantised tokens take fewer bytes each",
        least=1,
        below=2**31,
    )
    watermark: float = described(
        0.01, "share of KV blocks that admission leaves free", least=0, below=1
    )
    policy: str = described("vllm", f"KV-cache policy: {NAMES}, a Policy in a module of your own")
    run_ahead: bool = described(
        True, "whether a step is dispatched before the last one's tokens are read"
    )
    multi_step: int = described(
        1,
        "tokens that a step without prompts computes for each sequence in one dispatch; ends are "
        "seen, and requests admitted, that much later",
        least=1,
        most=MAX_MULTI_STEP,
    )
    prefix_caching: bool = described(
        False, "whether full KV blocks are kept for later prompts that begin alike"
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = described(
        "auto",
        "'recompute', 'swap', or 'auto': swap groups of several sequences, and all sequences of "
        "policies whose recomputation would decode output again token by token",
    )
    admit_after_swap: Literal["completed", "resumed"] = described(
        "completed",
        "whether new requests wait until swapped ones 'completed' (vLLM §4.5) or only 'resumed'",
    )
    tensor_parallel: int = described(
        1, "devices that share the model's heads and MLP", least=1, below=2**31
    )
    seed: int = described(0, "seed of requests without a seed of their own", least=0, below=2**32)
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = described(
        "auto", "dtype of cached keys and values; 'auto' is the dtype that the model computes in"
    )
    quantization: Literal["none", "w8a8", "w4a8"] = described(
        "none",
        "quantization of the layers' products. 'w8a8': 8-bit weights with a scale for each output "
        "channel, 8-bit activations with a scale for each token. 'w4a8': 4-bit weights, which also "
        "have a scale and a zero point for each 128 inputs",
    )
    adapter_slots: int = described(
        0,
        "LoRA adapters on the device at a time; 0 for none at all",
        least=0,
        most=MAX_ADAPTER_SLOTS,
    )
    max_adapter_rank: int = described(
        64, "largest rank of an adapter", least=1, most=MAX_ADAPTER_RANK
    )
    adapter_pages: int = described(
        0,
        f"pages of {PAGE_RANKS} ranks that the adapters on the device share; 0 for the most that "
        "adapter_slots can need",
        least=0,
        below=2**31,
    )
    adapter_host_bytes: int = described(
        2**30,
        "bytes of adapters that the host's memory keeps, so that they need not be read again",
        least=0,
        below=2**63,
    )
    max_overtakes: int = described(
        32,
        "later requests that may start before one whose adapter is not on the device",
        least=0,
        below=2**31,
    )
    # An instance of the policy's own `options`, or its fields by name.
    policy_options: Any = None

    def __post_init__(self):
        checks.make_plain(self)
        policy_of(self.policy)
        self._check_ranges()
        self._make_options()
        can = self.parts
        self._fill_defaults(can)
        others = self.max_num_seqs - 1
        if self.chunked_prefill and can.min_chunk + others > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must hold a prefill tile "
                f"of policy {self.policy!r} ({can.min_chunk} tokens) beside a token of each "
                f"other sequence ({others})"
            )
        if self.prefix_caching and not can.prefix_cache:
            raise ValueError(f"policy {self.policy!r} cannot share prefixes: prefix_caching")
        if self.preemption_mode == "swap" and not can.swap:
            raise ValueError(f"policy {self.policy!r} cannot swap a sequence: preemption_mode")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a whole sequence must fit a step: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len})"
            )
        policy_of(self.policy).check(self, None)

    def _make_options(self) -> None:
        kind, options = policy_of(self.policy).options, self.policy_options
        # A copy with another policy still has the former policy's `NoOptions`.
        if isinstance(options, NoOptions):
            options = None
        names = {field.name for field in dataclasses.fields(kind)}
        if options is None or (isinstance(options, Mapping) and set(options) <= names):
            try:
                chosen = kind(**(options or {}))
            except TypeError as error:  # an option without a default
                raise ValueError(f"policy_options of {self.policy!r}: {error}") from None
            object.__setattr__(self, "policy_options", chosen)
        elif not isinstance(options, kind):
            allowed = f"options of policy {self.policy!r} ({', '.join(sorted(names)) or 'none'})"
            raise checks.refusal("policy_options", allowed, options)
        checks.make_plain(self.policy_options)

    def _fill_defaults(self, can: Parts) -> None:
        object.__setattr__(self, "chunked_prefill", self.chunked_prefill and can.chunked_prefill)
        if self.max_num_batched_tokens == 0:
            others = self.max_num_seqs - 1
            prompts = can.min_chunk + others if self.chunked_prefill else self.max_model_len
            most = max(STEP_TOKENS, self.max_num_seqs, prompts)
            object.__setattr__(self, "max_num_batched_tokens", min(most, MAX_STEP_TOKENS))
        most = self.max_num_batched_tokens
        if self.max_model_len <= most < can.min_chunk + self.max_num_seqs - 1:
            object.__setattr__(self, "chunked_prefill", False)

    def _check_ranges(self) -> None:
        checks.require_bounds(self)
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs a token a step"
            )
        if self.kv_cache_tokens < self.page_size:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold at least one page of "
                f"{self.page_size} tokens"
            )
        if self.adapter_pages and not self.adapter_slots:
            raise ValueError(f"adapter_pages ({self.adapter_pages}) need adapter_slots, which is 0")
        if 0 < self.adapter_pages < num_pages(self.max_adapter_rank):
            raise ValueError(
                f"adapter_pages ({self.adapter_pages}) of {PAGE_RANKS} ranks must hold an adapter "
                f"of max_adapter_rank ({self.max_adapter_rank})"
            )
        if self._host_bytes > MAX_HOST_BYTES:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) sequences of max_model_len "
                f"({self.max_model_len}) tokens, and kv_cache_tokens ({self.kv_cache_tokens}) in "
                f"pages of {self.page_size}, need tables of {self._host_bytes / 2**30:,.1f} GiB in "
                f"the host's memory; allowed are {MAX_HOST_BYTES / 2**30:.0f} GiB"
            )

    @property
    def _host_bytes(self) -> int:
        """Bytes of the host's arrays that grow with the configuration: tokens of each slot, block
        tables of slots and of a step's rows, and four integers for each block."""
        blocks_each = -(-self.max_model_len // self.page_size)
        rows = 2 * self.max_num_seqs + self.max_prefills_per_step
        tables = rows * blocks_each + self.max_num_seqs * self.max_model_len
        return 4 * (tables + 4 * self.num_blocks)

    @property
    def num_adapter_pages(self) -> int:
        return self.adapter_pages or self.adapter_slots * num_pages(self.max_adapter_rank)

    @property
    def parts(self) -> Parts:
        parts = policy_of(self.policy).parts(self)
        if not isinstance(parts, Parts):
            raise ValueError(f"policy {self.policy!r}: parts must return Parts, not {parts!r}")
        return parts
