"""All ops by name."""

from pallas_kernels.block_sparse_attention import specs as block_sparse_attention
from pallas_kernels.kv_write import specs as kv_write
from pallas_kernels.lora import specs as lora
from pallas_kernels.page_selection import specs as page_selection
from pallas_kernels.paged_attention import specs as paged_attention
from pallas_kernels.prompt_attention import specs as prompt_attention
from pallas_kernels.quantized_attention import specs as quantized_attention
from pallas_kernels.specs import Op

OPS: dict[str, Op] = {
    "paged_attention": paged_attention.DECODE,
    "quantised_paged_attention": paged_attention.QUANTISED,
    "paged_prefill_attention": paged_attention.PREFILL,
    "hybrid_prefill_attention": block_sparse_attention.HYBRID,
    "mixed_precision_attention": quantized_attention.DECODE,
    "prompt_attention": prompt_attention.PROMPT,
    "select_pages": page_selection.SELECT,
    "write_key_statistics": page_selection.WRITE,
    "write_kv": kv_write.WRITE,
    "copy_pages": kv_write.COPY,
    "sgmv": lora.SGMV,
}
