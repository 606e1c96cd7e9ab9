"""JAX's CUDA plugin on a machine without an NVIDIA GPU."""

import importlib.util
import logging
import os

SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# JAX itself detects a GPU by these files, also in containers and under Windows.
GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def run_without_gpu() -> None:
    """Let JAX start on the CPU where its CUDA plugin is installed but there is no GPU.

    This must run before JAX looks for devices, so it runs when `pallas_kernels` is imported. The
    plugin queries the versions of CUDA's libraries. Without a GPU driver one of these libraries
    crashes the process. If the libraries are missing, the plugin prints a traceback.
    """
    if importlib.util.find_spec("jax_cuda13_plugin") is None or SKIP_CHECK in os.environ:
        return
    if any(map(os.path.exists, GPU_FILES)):
        return
    os.environ[SKIP_CHECK] = "1"
    if not os.environ.get("JAX_PLATFORMS"):
        logging.getLogger("pallas_kernels").warning(
            "this machine has no NVIDIA GPU for JAX's CUDA plugin: JAX runs on the CPU"
        )
