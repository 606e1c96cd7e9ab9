"""Loading a workload from a small file."""

import json

import pytest

from experiments.workloads import workloads
from experiments.workloads.workloads import Vocabulary, WorkloadConfig
from tests.experiments.conftest import TINY


@pytest.fixture
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, TINY.vocab_size, 1024)


@pytest.fixture
def file(tmp_path):
    def write(name: str, content) -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def load(spec: str, vocabulary, **options):
    return workloads.load(WorkloadConfig(spec, **options), vocabulary).requests
