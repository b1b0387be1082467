"""Grammars compiled beside an engine's steps."""

import os
import select
import threading
from typing import Any

import pytest

from dsa_compile.errors import ParameterError
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.server.grammar_worker import GrammarWorker
from dsa_compile.server.protocol import Compiled, CompileGrammar

PATIENCE = 60  # seconds
GRAMMAR = Grammar("regex", "a+")


class StubEngine:
    """Compiles nothing; raises what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def compile_grammar(self, grammar: Grammar) -> None:
        if self.error is not None:
            raise self.error


def wait_for(worker: GrammarWorker) -> list[Compiled]:
    assert select.select([worker.news], [], [], PATIENCE)[0]
    return worker.finished()


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (None, None),
        (ParameterError("grammar", "no such type"), "no such type"),
        (TypeError("of\n xgrammar"), "the grammar cannot be compiled: of xgrammar"),
    ],
)
def test_the_outcome_is_reported(error: Any, problem: str | None) -> None:
    worker = GrammarWorker(StubEngine(error))
    worker.submit(CompileGrammar("a", GRAMMAR))
    assert wait_for(worker) == [Compiled("a", problem)]
    assert worker.finished() == []


def test_a_loop_that_looks_just_before_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that handles other messages may look between a result and its signal."""
    reached, allowed = threading.Event(), threading.Event()
    signal = os.eventfd_write

    def late(descriptor: int, value: int) -> None:
        reached.set()
        assert allowed.wait(PATIENCE)
        signal(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    worker = GrammarWorker(StubEngine())
    worker.submit(CompileGrammar("a", GRAMMAR))
    assert reached.wait(PATIENCE)
    assert worker.finished() == []
    allowed.set()
    assert wait_for(worker) == [Compiled("a", None)]
