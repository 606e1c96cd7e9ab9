"""Attention and cache-write kernels over arrays and index tables, without requests or models."""

from pallas_kernels import cuda_plugin

cuda_plugin.run_without_gpu()
