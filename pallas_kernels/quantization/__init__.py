"""Quantised keys and values: the layout of pages, and the quantiser (LServe §3.2)."""

from pallas_kernels.quantization.codes import ByChannel, Codes, in_planes, out_of_planes
from pallas_kernels.quantization.format import KVFormat
from pallas_kernels.quantization.outliers import as_codes, put_back, quantize_but
from pallas_kernels.quantization.pages import QuantizedPages
from pallas_kernels.quantization.quantizer import dequantize, quantize

__all__ = [
    "ByChannel", "Codes", "KVFormat", "QuantizedPages", "as_codes", "dequantize", "in_planes",
    "out_of_planes", "put_back", "quantize", "quantize_but",
]  # fmt: skip
