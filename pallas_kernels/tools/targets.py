"""GPUs to compile for on a machine that has none."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.backend import GPU


@dataclass(frozen=True)
class Target:
    """A GPU as its data sheet and CUDA describe it; sizes in bytes, rates in bytes/s and GHz.

    tensor_flops: FLOPs per second of dense products of 16-bit numbers.
    tensor_flops_per_clock: FLOPs of a multiprocessor per clock.
    """

    name: str
    gpu: GPU
    memory: int
    memory_bandwidth: int
    l2: int
    clock: float
    fpus_per_multiprocessor: int
    shared_memory: int  # bytes of a multiprocessor
    shared_memory_of_block: int
    tensor_flops: int
    tensor_flops_per_clock: int

    @property
    def tensor_clock(self) -> float:
        """Clocks per second at which the multiprocessors reach `tensor_flops`."""
        flops = self.gpu.num_multiprocessors * self.tensor_flops_per_clock
        return self.tensor_flops / flops

    def config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        major, minor = self.gpu.compute_capability
        # Kernels with wgmma need the features that only this architecture has (sm_90a).
        features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory}
              threads_per_core_limit: 2048
              core_count: {self.gpu.num_multiprocessors}
              fpus_per_core: {self.fpus_per_multiprocessor}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_bandwidth}
              l2_cache_size: {self.l2}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              shared_memory_per_block_optin: {self.shared_memory_of_block}
              cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
            device_description_str: "{self.name}"
        """


_HOPPER: dict[str, Any] = {
    "clock": 1.98,
    "fpus_per_multiprocessor": 128,
    "shared_memory": 233472,
    "shared_memory_of_block": 232448,
    "tensor_flops": 989 * 10**12,
    "tensor_flops_per_clock": 4096,
}
TARGETS = {
    "h200": Target(
        "NVIDIA H200", GPU((9, 0), 132), 150 * 10**9, 4800 * 10**9, 60 * 2**20, **_HOPPER
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", GPU((9, 0), 132), 85 * 10**9, 3350 * 10**9, 50 * 2**20, **_HOPPER
    ),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", GPU((8, 0), 108), 85 * 10**9, 2039 * 10**9, 40 * 2**20,
        clock=1.41, fpus_per_multiprocessor=64,
        shared_memory=167936, shared_memory_of_block=166912,
        tensor_flops=312 * 10**12, tensor_flops_per_clock=2048,
    ),
}  # fmt: skip
