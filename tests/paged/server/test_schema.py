"""Requests that schemathesis generates from the server's own OpenAPI document: some that it allows,
and some that it forbids."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from paged.server.settings import ServerConfig
from tests.paged.server.serving import served, simulated

pytestmark = pytest.mark.slow  # hundreds of requests
# No check requires that the server accepts every request that the document allows: temperatures,
# model names and lengths have bounds that depend on the server, each other and the engine.
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method,
    allow_header_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def api():
    settings = ServerConfig(allow_adapter_loading=True)
    with served(simulated()[0], settings=settings) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        assert not any(server.wait_until_idle().values())


@pytest.mark.parametrize("mode", GenerationMode)
def test_the_document_is_kept(api, mode: GenerationMode):
    operations = [result.ok() for result in api.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/tokenize"}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # a request without a body cannot be wrong

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "bundled"  # a random name would be refused
            case.call_and_validate(checks=CHECKS)

        check()
