"""Attention, LoRA and cache-write kernels over arrays and index tables, without requests."""

from pallas_kernels import cuda_plugin

cuda_plugin.run_without_gpu()
