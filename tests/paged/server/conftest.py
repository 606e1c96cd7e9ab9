from collections.abc import Iterator

import pytest

from tests.paged.server.serving import Served, served, simulated


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(simulated()[0]) as running:
        yield running
        assert not any(running.wait_until_idle().values())
