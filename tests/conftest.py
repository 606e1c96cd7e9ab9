"""Engines of equal configuration compile equal programs: each is compiled once in a test run."""

import os

import jax
import pytest

# What interpreted GPU kernels need so as not to wait for each other's threads.
os.environ.setdefault("PJRT_NPROC", "8")


@pytest.fixture(scope="session", autouse=True)
def shared_compilations(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax_cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
