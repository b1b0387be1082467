"""Malformed bodies that schemathesis makes from the OpenAPI schema: never a 5xx, never a hang."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.many_cases import many
from tests.server.serving import PATIENCE, Server, serving

schemathesis = pytest.importorskip("schemathesis")
requests = pytest.importorskip("requests")

# What is well-formed after all runs, and must not run for long.
SMALL = ("--max-model-len", "48", "--max-choices", "4")
MODES = schemathesis.GenerationMode


@pytest.fixture(scope="module")
def small(artifact) -> Iterator[Server]:
    with serving(artifact, *SMALL) as server:
        yield server
        server.wait_for_idle()
        assert server.get("/health").json() == {"status": "ready", "restarts": 0}
        assert not any("Traceback" in line for line in server.log), "\n".join(server.log)
        assert server.terminate() == 0


def send_malformed(server: Server, count: int) -> None:
    """Send ``count`` cases, to each endpoint with a body as many, of both kinds that there are."""
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    assert {operation.path for operation in posts} >= {"/v1/completions", "/v1/chat/completions"}
    with requests.Session() as session:
        for operation in posts:
            send_cases(server, session, operation, count // len(posts))


def send_cases(server: Server, session, operation, count: int) -> None:
    malformed = operation.as_strategy(generation_mode=MODES.NEGATIVE)
    valid = operation.as_strategy(generation_mode=MODES.POSITIVE)
    declared = {int(status) for status in operation.definition.raw["responses"]}

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(malformed, malformed, malformed, valid))
    def check(case) -> None:
        response = case.call(base_url=server.url, session=session, timeout=PATIENCE)
        assert response.status_code < 500, (case.body, response.text)
        assert response.status_code in declared, (case.body, response.status_code)
        if response.status_code != 200:
            anthropic = case.path.startswith("/v1/messages")  # has its own
            fields = {"message", "type"} | (set() if anthropic else {"param", "code"})
            assert set(response.json()["error"]) == fields

    check()


@pytest.mark.slow
def test_some_malformed_bodies(small: Server) -> None:
    send_malformed(small, 200)


@pytest.mark.slow
@pytest.mark.skipif("DSA_TEST_CASES" not in os.environ, reason="as many as DSA_TEST_CASES says")
def test_many_malformed_bodies(small: Server) -> None:
    send_malformed(small, many(600))
