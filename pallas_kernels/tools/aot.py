"""JAX devices for GPUs that this machine lacks. Programs can be compiled for them, but not run."""

import importlib.util
import logging
import os
from pathlib import Path

import jax

from pallas_kernels.tools.targets import TARGETS


def devices(target: str, count: int = 1) -> list[jax.Device]:
    """`count` GPUs of the kind `target`, a key of `TARGETS`, in one machine.

    Programs for them must be lowered inside `backend.compiling_for(TARGETS[target].gpu)`.

    Raises ValueError for an unknown target, for a count below 1, and if JAX's CUDA plugin is not
    installed.
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; allowed: {', '.join(sorted(TARGETS))}")
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ValueError(
            "jax-cuda13-plugin is not installed: pip install 'paged-jax[aot]' brings it, or in a "
            "checkout pip install -e '.[aot]'"
        )
    _find_disassembler()
    # Otherwise JAX's plugin would require CUDA's libraries when it is loaded.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Otherwise JAX would warn at length that there is no GPU.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=TARGETS[target].config(), topology=f"1x1x{count}"
    )
    return list(topology.devices)


def _find_disassembler() -> None:
    """Point Mosaic to the disassembler of the package nvidia-cuda-nvdisasm.

    Mosaic disassembles every kernel, and searches the disassembler only in a CUDA installation.
    """
    name = "MOSAIC_GPU_CUDA_ROOT"
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package else []:
        tool = Path("bin") / "nvdisasm"
        if (Path(folder) / "cu13" / tool).exists() and not (
            Path(os.environ.get(name, "")) / tool
        ).exists():
            os.environ[name] = str(Path(folder) / "cu13")
