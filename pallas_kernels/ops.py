"""A table of all ops, with their implementations and named arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pallas_kernels.backend import MADE_FOR
from pallas_kernels.block_sparse_attention import hybrid
from pallas_kernels.block_sparse_attention import specs as block_sparse_specs
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.kv_write import specs as kv_write_specs
from pallas_kernels.lora import api as lora
from pallas_kernels.lora import specs as lora_specs
from pallas_kernels.page_selection import api as page_selection
from pallas_kernels.page_selection import specs as page_selection_specs
from pallas_kernels.paged_attention import api as paged_attention
from pallas_kernels.paged_attention import specs as paged_attention_specs
from pallas_kernels.quantized_attention import api as quantized_attention
from pallas_kernels.quantized_attention import specs as quantized_attention_specs
from pallas_kernels.specs import Spec


@dataclass(frozen=True)
class Op:
    """One op: its implementations by name, and its named arguments (specs.py)."""

    implementations: Mapping[str, Callable]
    specs: Mapping[str, Spec]

    def kernel_for(self, compute_capability: tuple[int, int]) -> str | None:
        """The name of the kernel for GPUs of this compute capability, or None."""
        for name, major in MADE_FOR.items():
            if major == compute_capability[0] and name in self.implementations:
                return name
        return None


OPS = {
    "paged_attention": Op(paged_attention.DECODE, paged_attention_specs.DECODE),
    # Of quantised pages: other kernels, and none for Ampere.
    "quantised_paged_attention": Op(
        paged_attention.DECODE_QUANTISED, paged_attention_specs.QUANTISED
    ),
    "paged_prefill_attention": Op(paged_attention.PREFILL, paged_attention_specs.PREFILL),
    "hybrid_prefill_attention": Op(hybrid.HYBRID, block_sparse_specs.HYBRID),
    "mixed_precision_attention": Op(quantized_attention.DECODE, quantized_attention_specs.DECODE),
    "prompt_attention": Op(quantized_attention.PROMPT, quantized_attention_specs.PROMPT),
    "select_pages": Op(page_selection.SELECT, page_selection_specs.SELECT),
    "write_key_statistics": Op(page_selection.WRITE, page_selection_specs.WRITE),
    "write_kv": Op(kv_write.WRITE, kv_write_specs.WRITE),
    "copy_pages": Op(kv_write.COPY, kv_write_specs.COPY),
    "sgmv": Op(lora.SGMV, lora_specs.SGMV),
}
