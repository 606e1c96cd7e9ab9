"""JAX's settings for a test run: equal programs are compiled once, in a shared cache."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# JAX reads these when it is imported, in pytest's workers and in programs that tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="paged_jax_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# With too few threads, the threads of interpreted GPU kernels wait for each other.
os.environ.setdefault("PJRT_NPROC", "8")
# Most programs of tests run only a few times: XLA's optimisation takes longer than it saves.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

MAPS = Path("/proc/self/maps")
# Linux gives a process 65,530 memory maps, and each compiled program takes about 14.
MOST_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Drop JAX's compiled programs after a module, once the worker has too many memory maps."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax  # after the settings above

        jax.clear_caches()
        gc.collect()
