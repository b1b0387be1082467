import pytest

import dsa_compile.runtime
from tests.cli.stub_engine import Letters, StubEngine


@pytest.fixture
def engine(monkeypatch):
    class Engine(StubEngine):
        pass

    monkeypatch.setattr(dsa_compile.runtime, "Engine", Engine)
    return Engine


@pytest.fixture
def engine_with_text(engine):
    engine.tokenizer = Letters()
    return engine
