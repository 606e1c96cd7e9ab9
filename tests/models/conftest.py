import shutil
from pathlib import Path

import pytest

from tests.models.goldens import GOLDEN


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of one file that a test may break."""
    return Path(shutil.copytree(GOLDEN / "llama_mha", tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path):
    return Path(shutil.copytree(GOLDEN / "qwen3_sharded", tmp_path / "sharded"))
