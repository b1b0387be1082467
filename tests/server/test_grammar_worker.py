"""Grammars compiled beside an engine's steps."""

import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from dsa_compile.errors import ParameterError
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.server.grammar_process import GrammarTrial, Vocabulary
from dsa_compile.server.grammar_worker import GrammarWorker
from dsa_compile.server.protocol import Compiled, CompileGrammar
from tests.trained import trained_model

PATIENCE = 60  # seconds
GRAMMAR = Grammar("regex", "a+")


class StubEngine:
    """Compiles nothing; raises what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def compile_grammar(self, grammar: Grammar) -> None:
        if self.error is not None:
            raise self.error


class StubTrial:
    """Finds nothing wrong."""

    def problem(self, grammar: Grammar) -> str | None:
        return None


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
    worker = GrammarWorker(StubEngine(error), StubTrial)
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
    worker = GrammarWorker(StubEngine(), StubTrial)
    worker.submit(CompileGrammar("a", GRAMMAR))
    assert reached.wait(PATIENCE)
    assert worker.finished() == []
    allowed.set()
    assert wait_for(worker) == [Compiled("a", None)]


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    text = (trained_model() / "tokenizer.json").read_text()
    return Vocabulary(text, Tokenizer.from_str(text).get_vocab_size(), (1,), cpu_seconds=2)


@pytest.fixture(scope="module")
def trial(vocabulary: Vocabulary) -> Iterator[GrammarTrial]:
    trial = GrammarTrial(vocabulary)
    yield trial
    trial.close()


def nested(depth: int) -> str:
    return "a" if not depth else f"({nested(depth - 1)}{{0,100}})"


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("regex", "[a-z]{1,20}( [a-z]{1,20}){1,50}"), None),
        (Grammar.json_schema({"type": "array", "maxItems": 10**6}), None),
        (Grammar("regex", "(a"), "sampling parameter grammar"),
        (Grammar("regex", nested(7)), "more than"),
        (Grammar.json_schema({"type": "string", "pattern": f"^{nested(4)}$"}), "more than"),
        (Grammar.json_schema({"enum": ["a" * n for n in range(300)]}), None),
    ],
)
def test_grammars_are_tried(trial: GrammarTrial, grammar: Grammar, problem: str | None) -> None:
    found = trial.problem(grammar)
    assert found is None if problem is None else problem in (found or ""), found


def test_a_grammar_nobody_waits_for_is_stopped(vocabulary: Vocabulary) -> None:
    begun = threading.Event()

    class Slow(GrammarTrial):
        def problem(self, grammar: Grammar) -> str | None:
            begun.set()
            return super().problem(grammar)

    trial = Slow(msgspec.structs.replace(vocabulary, cpu_seconds=10**4))
    worker = GrammarWorker(StubEngine(), lambda: trial)
    for name in "abc":
        worker.submit(CompileGrammar(name, Grammar("regex", nested(7) if name == "a" else "a")))
    assert begun.wait(PATIENCE)
    worker.cancel(["a", "b"])
    found = []
    while len(found) < 2:
        found += wait_for(worker)
    assert [(compiled.request_id, compiled.problem is None) for compiled in found] == [
        ("a", False),
        ("c", True),
    ]
    trial.close()
