"""GPUs that this machine lacks, as targets of compilation."""

import pytest

from pallas_kernels.tools import aot


def test_unknown_gpus_are_refused():
    with pytest.raises(ValueError, match="unknown target 'z80'; allowed: a100, h100, h200"):
        aot.devices("z80")


def test_fewer_than_one_gpu_is_refused():
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        aot.devices("h200", 0)
