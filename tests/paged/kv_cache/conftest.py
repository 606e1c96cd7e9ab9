import pytest

from tests.paged.kv_cache.policy_suite import Bench


@pytest.fixture(scope="module")
def bench(tiny_params):
    return Bench(tiny_params)
