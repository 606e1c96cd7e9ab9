"""Engines of equal configuration compile equal programs: each is compiled once in a test run."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Set before JAX is imported, for pytest's workers and the programs that tests start as well.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="paged_jax_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# What interpreted GPU kernels need so as not to wait for each other's threads.
os.environ.setdefault("PJRT_NPROC", "8")
# Most programs of tests run a few times only: XLA would be longer at improving them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

MAPS = Path("/proc/self/maps")
# Linux gives a process 65,530 memory maps, and each compiled program takes about 14.
MOST_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """A worker that has compiled thousands of programs forgets those of former modules."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax  # not before the settings above

        jax.clear_caches()
        gc.collect()
