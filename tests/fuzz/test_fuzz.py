"""Damaged artifacts, models, files and requests: refused in a line, or harmless.

The same cases every time. ``python -m tests.fuzz.run`` draws new ones for as long as one likes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.bases import make_bases
from tests.fuzz.cases import Case
from tests.fuzz.json_mutations import dump, mutate, paths
from tests.fuzz.pool import Result, Worker
from tests.fuzz.targets import TARGETS
from tests.quick_cases import quick_first

CASES = 25  # of each target
# Seconds each, and they compile: for the hour's run.
_SLOW = ("compiled",)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    base = tmp_path_factory.mktemp("fuzz")
    make_bases(base)
    made = Worker(base)
    yield made
    made.close()


def _report(result: Result) -> str:
    return f"{result.case}: {result.problem}\n{result.trace}"


@pytest.mark.slow
@pytest.mark.parametrize("target", quick_first([name for name in TARGETS if name not in _SLOW], 3))
def test_fixed_cases(worker, target):
    for seed in range(CASES):
        result = worker.run(Case.of(target, seed))
        assert not result.problem, _report(result)


def test_a_case_is_repeatable():
    document = {"a": [1, 2, {"b": "text"}], "c": None}
    for seed in range(50):
        case = Case.of("manifest", seed)
        once, twice = (dump(mutate(document, case.rng(0))) for _ in range(2))
        assert once == twice


def test_mutations_reach_every_place():
    document = {"a": [1, 2, {"b": "text"}], "c": {"d": 0.5}}
    untouched = set(paths(document))
    for seed in range(400):
        changed = mutate(document, Case.of("manifest", seed).rng())
        untouched -= {path for path in untouched if _get(changed, path) != _get(document, path)}
    assert not untouched


def _get(value, path):
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("import os; os.abort()", "process ended: signal 6"),
        ("raise Finding('wrong tokens')", "Finding: wrong tokens"),
        ("bytearray(16 << 30)", "MemoryError"),
        ("resource.setrlimit(resource.RLIMIT_CPU, (1, 60)); [0 for _ in iter(int, 1)]", "signal"),
    ],
)
def test_what_must_not_happen_is_found(tmp_path: Path, monkeypatch, body, says):
    """A target that does it, in a worker like any other."""
    (tmp_path / "sitecustomize.py").write_text(
        "import resource, sys, tests.fuzz.targets as t\n"
        "from tests.fuzz.cases import Finding\n"
        f"def bad(case, base, work):\n    {body}\n"
        "t.TARGETS['bad'] = bad\n"
    )
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    worker = Worker(tmp_path)
    result = worker.run(Case("bad", 0, (0,)))
    worker.close()
    assert says in result.problem
