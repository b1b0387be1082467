"""The trained model as an artifact, a server over it, and an engine to compare with."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import dsa_compile
from dsa_compile.runtime import Engine
from tests.server.serving import PATIENCE, Server, serving
from tests.trained import trained_model

KEY = "secret-of-the-tests"


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "tiny"
    dsa_compile.compile(str(trained_model()), str(out), recipe="fp32", records=False)
    return out


@pytest.fixture(scope="session")
def server(artifact: Path) -> Iterator[Server]:
    """Shared by tests that leave it as it was."""
    with serving(artifact) as found:
        yield found


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    url = server.url + "/v1"
    return openai.OpenAI(base_url=url, api_key="any", timeout=PATIENCE, max_retries=0)


@pytest.fixture(scope="session")
def engine(artifact: Path) -> Engine:
    return Engine.load(artifact)
