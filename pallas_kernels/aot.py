"""Devices to compile for that this machine does not have."""

import importlib.util
import logging
import os
from pathlib import Path

# Only a machine with a GPU has the CUDA libraries that JAX would look for.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Where the package nvidia-cuda-nvdisasm puts the disassembler that Mosaic's dumps call.
if package := importlib.util.find_spec("nvidia"):
    folders = package.submodule_search_locations or []
    os.environ.setdefault("CUDA_ROOT", str(Path(next(iter(folders))) / "cu13"))
logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)

from jax.experimental import topologies  # noqa: E402

from pallas_kernels.targets import TARGETS  # noqa: E402


def devices(target: str, count: int = 1) -> list:
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=TARGETS[target].config(), topology=f"1x1x{count}"
    ).devices
