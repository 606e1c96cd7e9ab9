"""Engines of equal configuration compile equal programs: each is compiled once in a test run."""

import atexit
import os
import shutil
import tempfile

# Set before JAX is imported, for pytest's workers and the programs that tests start as well.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="paged_jax_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# What interpreted GPU kernels need so as not to wait for each other's threads.
os.environ.setdefault("PJRT_NPROC", "8")
