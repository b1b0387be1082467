"""Checks divided among processes."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from dsa_compile.cli.inspect import command
from dsa_compile.verify import recompiled_artifact
from dsa_compile.verify.bisect import bisect_artifact, other_causes
from dsa_compile.verify.bisect.culprit import Cause
from dsa_compile.verify.checks import verify_compilation
from dsa_compile.verify.checks.pass_check import PassChecker
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution import forked
from dsa_compile.verify.execution.forked import Forked
from dsa_compile.verify.execution.replay import PassRun
from dsa_compile.verify.execution.shared_jobs import shared_jobs
from dsa_compile.verify.recompiled_artifact import ExportedArtifact, RecompiledArtifact

LENGTH = 27


@pytest.fixture(autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_a_result_and_an_error_come_back() -> None:
    def fail() -> NoReturn:
        raise ValueError("wrong")

    with Forked(lambda: (os.getpid(), [1, 2])) as one, Forked(fail) as other:
        process, made = one.result()
        assert process != os.getpid()
        assert made == [1, 2]
        with pytest.raises(ValueError, match="wrong"):
            other.result()


def test_an_error_that_cannot_be_read_back_is_raised_here() -> None:
    class Needy(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail() -> NoReturn:
        raise Needy(1, 2)

    with Forked(fail) as one, pytest.raises(Needy, match="1 and 2"):
        one.result()


def test_jobs_are_shared_with_a_process_that_has_begun() -> None:
    started, begun = os.pipe()
    second, taken = os.pipe()

    def first() -> tuple[int, int]:
        """Ends once another process has taken the second job."""
        os.write(begun, b".")
        os.read(second, 1)
        return 0, os.getpid()

    def telling() -> tuple[int, int]:
        os.write(taken, b".")
        return 1, os.getpid()

    jobs = [first, telling, *(lambda n=n: (n, os.getpid()) for n in range(2, 5))]
    with shared_jobs(jobs, lambda made: made[0] == 3) as results:
        os.read(started, 1)
        made = results()
    assert [number for number, _ in made] == [0, 1, 2, 3]
    assert made[0][1] != os.getpid()
    assert made[1][1] == os.getpid()


def test_a_job_that_a_killed_process_had_taken_is_run_here() -> None:
    here = os.getpid()
    taken, takes = os.pipe()

    def deadly() -> str:
        if os.getpid() != here:
            os.write(takes, b".")
            os._exit(1)
        return "made"

    with shared_jobs([deadly, lambda: "also"], lambda _: False) as results:
        os.read(taken, 1)
        assert results() == ["made", "also"]


def test_what_kills_a_process_is_run_here() -> None:
    here = os.getpid()

    def killed_elsewhere() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), 9)
        return here

    with Forked(killed_elsewhere) as one:
        assert one.result() == here


def test_a_process_that_is_not_waited_for_is_stopped() -> None:
    with Forked(lambda: time.sleep(3600)):
        pass  # what it leaves is looked for behind every test


def test_processes_have_no_more_threads_than_this_one_had() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Forked(torch.get_num_threads) as one, Forked(torch.get_num_threads) as other:
            assert [torch.get_num_threads(), one.result(), other.result()] == [1, 1, 1]
            with Forked(torch.get_num_threads):
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_parts_find_what_one_process_finds(recompiled: RecompiledArtifact) -> None:
    prompt = recompiled.prompt(tokens=LENGTH)
    shown: list[str] = []
    alone = verify(recompiled.replay, recompiled.store, prompt)
    parts = verify(
        recompiled.replay, recompiled.store, prompt, None, lambda r: shown.append(r.name), 3
    )
    assert parts.ok
    names = [report.name for report in alone.passes]
    assert [report.name for report in parts.passes] == shown == names
    for mine, theirs in zip(parts.passes, alone.passes, strict=True):
        assert replace(mine, layers={}, error=0.0) == replace(theirs, layers={}, error=0.0)
        assert mine.error == pytest.approx(theirs.error, rel=0.1)
    assert {(s.position, s.layer) for s in parts.sites} == {
        (s.position, s.layer) for s in alone.sites
    }


@pytest.mark.parametrize("count", [1, 2, 3, 99])
def test_every_pass_is_in_one_part(recompiled: RecompiledArtifact, count: int) -> None:
    parts = verify_compilation._divided(recompiled.replay, None, count)
    runs = recompiled.replay.runs
    assert [index for part in parts for index in part] == [
        index for index, run in enumerate(runs) if run.sites
    ]
    assert len(parts) <= count
    assert verify_compilation._divided(recompiled.replay, ("no pass",), count) == [[]]


def test_nothing_is_said_behind_a_program_that_does_not_run(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = PassChecker.check

    def failing(checker: PassChecker, index: int, run: PassRun, until: int | None = None) -> Any:
        report = check(checker, index, run, until)
        checker.broken = run.step.name == "pack_swiglu"
        return report

    monkeypatch.setattr(PassChecker, "check", failing)
    prompt = recompiled.prompt(tokens=LENGTH)
    reports = [
        verify(recompiled.replay, recompiled.store, prompt, processes=count) for count in (1, 4)
    ]
    names = [[found.name for found in report.passes] for report in reports]
    assert names[0] == names[1]
    assert names[0][-1] == "pack_swiglu"


def test_bisect_looks_beyond_rewrites_beside_verify(
    recompiled: RecompiledArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompiled_artifact, "usable_processes", lambda: 2)
    found_wrong = [lambda: ("batching", "differs")]
    monkeypatch.setattr(other_causes, "option_checks", lambda _: found_wrong)
    prompt = recompiled.prompt(tokens=LENGTH)
    found = bisect_artifact.bisect_artifact(
        recompiled, prompt, None, None, None, tmp_path, lambda _: None
    )
    assert (found.cause, found.name) == (Cause.OPTION, "batching")


@pytest.mark.slow
def test_the_command_exports_again_beside_verify(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forked, "usable_processes", lambda: 2)
    line = [str(artifact), "verify", "--tokens", str(LENGTH), "--pass", "recognize_swiglu"]
    with ExitStack() as stack:
        stack.callback((artifact / "verify.json").unlink)
        assert command.main(line) == 0
        problem = "graph moe as exported is not what exporting the model again gives"
        monkeypatch.setattr(ExportedArtifact, "problems", lambda self: [problem])
        assert command.main(line) == 1
    assert problem in " ".join(capsys.readouterr().out.split())
