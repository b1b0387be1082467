"""Halving, and what survives an interruption of it."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsa_compile import passes
from dsa_compile.errors import UserError
from dsa_compile.verify.bisect.compiler_digest import compiler_digest
from dsa_compile.verify.bisect.search import STATE, Log, Trial, first_bad


class Checker:
    """Bad from one position on; notes what it was asked."""

    def __init__(self, first: int, fail_after: int | None = None) -> None:
        self.first = first
        self.asked: list[int] = []
        self._fail_after = fail_after

    def __call__(self, position: int) -> Trial:
        if len(self.asked) == self._fail_after:
            raise KeyboardInterrupt
        self.asked.append(position)
        return Trial(position, position >= self.first, "told")


def search(count: int, check: Checker, log: Log) -> int:
    return first_bad(count, check, log, lambda trial: None)


@pytest.mark.parametrize("count", [1, 2, 7, 156])
def test_finds_every_position_within_the_bound(count: int) -> None:
    for first in range(1, count + 1):
        log = Log("key")
        assert search(count, Checker(first), log) == first
        assert len(log.trials) <= 2 + math.ceil(math.log2(count))
        assert len({trial.position for trial in log.trials}) == len(log.trials)


def test_bad_without_any_rewrite() -> None:
    assert search(9, Checker(0), Log("key")) == 0


def test_good_with_all_rewrites_makes_no_sense() -> None:
    with pytest.raises(UserError, match=r"passes on the artifact .*\(told\): there is nothing"):
        search(9, Checker(10), Log("key"))


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    path = tmp_path / STATE
    whole = Checker(100)
    assert search(156, whole, Log("key")) == 100
    stopped = Checker(100, fail_after=4)
    with pytest.raises(KeyboardInterrupt):
        search(156, stopped, Log.open("key", path))
    rest = Checker(100)
    log = Log.open("key", path)
    assert log.resumed == 4
    assert search(156, rest, log) == 100
    assert stopped.asked + rest.asked == whole.asked


def test_another_search_begins_anew_where_an_earlier_one_was_kept(tmp_path: Path) -> None:
    path = tmp_path / STATE
    Log.open("key", path).add(Trial(3, True, ""))
    log = Log.open("other", path)
    assert (log.trials, log.resumed) == ([], 0)
    log.add(Trial(5, False, ""))
    assert [trial.position for trial in Log.open("other", path).trials] == [5]


@pytest.mark.parametrize("text", ["", "{}", '{"key": "key", "trials": [{"position": 1}]}', "[1]"])
def test_a_damaged_state_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / STATE
    path.write_text(text)
    with pytest.raises(UserError, match="not the state of a search; remove it"):
        Log.open("key", path)


def test_a_changed_compiler_is_another_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = SimpleNamespace(regions={}, weights=SimpleNamespace(to_json=dict))
    file = tmp_path / "fuse.py"
    file.write_text("scale = 2\n")
    monkeypatch.setattr(passes, "__path__", [str(tmp_path)])
    before = compiler_digest(program)  # type: ignore[arg-type]
    assert compiler_digest(program) == before  # type: ignore[arg-type]
    file.write_text("scale = 1\n")
    assert compiler_digest(program) != before  # type: ignore[arg-type]
