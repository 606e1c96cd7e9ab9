"""JAX's CUDA plugin on a machine without an NVIDIA GPU."""

import importlib.util
import logging
import os

SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# Where JAX itself looks for a GPU, in containers and under Windows too.
GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def run_without_gpu() -> None:
    """Let JAX come up on the CPU where its CUDA plugin is installed and no GPU is there.

    Must run before JAX looks for devices, so every package that computes with JAX calls it when it
    is imported. The plugin asks CUDA's libraries for their versions: without a GPU's driver one of
    them crashes the process, and where they are missing a traceback comes before all output.
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
