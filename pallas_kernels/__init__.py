"""Attention and cache-write kernels over arrays and index tables; knows no request and no model."""

from pallas_kernels import cuda_plugin

cuda_plugin.run_without_gpu()
