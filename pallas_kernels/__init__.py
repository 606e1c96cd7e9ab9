"""Attention and cache-write kernels over arrays and index tables; knows no request and no model."""
