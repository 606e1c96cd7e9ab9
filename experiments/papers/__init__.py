"""The papers: a folder for each paper, a study for each figure or table."""

# Folder: short name, title, number on arXiv.
PAPERS = {
    "vllm": ("vLLM", "Efficient Memory Management for Large Language Model Serving with "
             "PagedAttention", "2309.06180"),
    "punica": ("Punica", "Punica: Multi-Tenant LoRA Serving", "2310.18547"),
    "lserve": ("LServe", "LServe: Efficient Long-sequence LLM Serving with Unified Sparse "
               "Attention", "2502.14866"),
    "diffkv": ("DiffKV", "DiffKV: Differentiated Memory Management for Large Language Models "
               "with Parallel KV Compaction", "2412.03131"),
}  # fmt: skip
