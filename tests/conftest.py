"""Settings of the whole suite."""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from dsa_compile.facts import gpus
from tests.exports import keep_exports
from tests.gpu_sharing import own_first, shared, visible

pytest_plugins = ["tests.seeds"]

GPUS = torch.cuda.device_count()
KERNEL_TESTS = Path(__file__).parent / "kernels"
# The models are tiny: a second thread only waits, and the suite already runs one process a core.
torch.set_num_threads(1)
keep_exports()
# What is compiled without a target is for the CPU on every machine; tests name a GPU's.
gpus.find_driver = lambda: gpus.Driver(None, ())
# Random cases are the same in every run, so that a run judges the change and not its luck.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("new", derandomize=False)
hypothesis.settings.load_profile("new" if "DSA_TEST_CASES" in os.environ else "fixed")
# Tables are as wide as they need to be, whatever the terminal or a plugin says.
os.environ.pop("COLUMNS", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--require-gpu``, for those who want the tests on a GPU and not their being skipped."""
    parser.addoption("--require-gpu", action="store_true", help="fail if no test ran on a GPU")


def pytest_configure(config: pytest.Config) -> None:
    if worker := getattr(config, "workerinput", None):
        os.environ |= own_first(os.environ, worker["workerid"], GPUS, worker["workercount"])
    if not config.getoption("--require-gpu"):
        return
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this build of torch is for the CPU only)"
        raise pytest.UsageError(f"these tests need a CUDA GPU, and torch sees none here{built}")
    if not hasattr(config, "workerinput"):  # one of several processes may well have none to run
        config.pluginmanager.register(_Ran())


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Undo what a command run in this process does to logging, for those that come after it."""
    loggers = [logging.getLogger(name) for name in ("dsa_compile", "uvicorn")]
    before = [(list(each.handlers), each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture(autouse=True)
def _shared_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no other test have the GPUs of one marked ``gpu(alone=True)`` meanwhile."""
    marks = list(request.node.iter_markers("gpu"))
    if not marks or not torch.cuda.is_available():
        yield
        return
    count = max(mark.kwargs.get("count", 1) for mark in marks)
    alone = any(mark.kwargs.get("alone") for mark in marks)
    with shared(visible(os.environ, GPUS)[:count], alone=alone):
        yield
        # what a later test imports would run on the CPU, and be right
        assert os.environ.get("TRITON_INTERPRET") != "1", "this test left Triton's interpreter on"
        gc.collect()
        torch.cuda.empty_cache()  # what torch keeps, other processes cannot have


class _Ran:
    """Fails a session whose every test was skipped."""

    def __init__(self) -> None:
        self._count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count += report.when == "call" and not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._count and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._count:
            terminalreporter.write_line("no test ran: none of them takes this GPU", red=True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a value of many characters by its parameter: names of tests are for logs."""
    return argname if isinstance(val, str | bytes | int) and len(str(val)) > 60 else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the time of a run went, so that its growth is seen."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
                seconds[folder] += report.duration
    if len(seconds) > 1:
        folders = (f"{name} {spent:.0f}" for name, spent in seconds.most_common())
        terminalreporter.write_line("seconds by folder: " + ", ".join(folders))


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skip what this machine's GPU cannot run, and mark what goes to one process or comes last."""
    leave_to_the_night(items)
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        if KERNEL_TESTS not in item.path.parents:  # what a file compiles is for all its tests
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        for mark in item.iter_markers("gpu"):
            if mark.kwargs.get("count", 1) > 1:
                item.add_marker(pytest.mark.several_gpus)
            if lacking := lacks(found, GPUS, **mark.kwargs):
                item.add_marker(pytest.mark.skip(reason=lacking))


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Mark as ``nightly`` the cases of a slow test but those that CI runs.

    CI runs the cases marked ``ci``, or the first one where none is. Tests that ask a server share
    one, so all of their cases run in CI.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):  # processes, which all its tests share
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.ci)
        if item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for slow in cases.values():
        chosen = [item for item in slow if item.get_closest_marker("ci")] or slow[:1]
        for item in slow:
            if item not in chosen:
                item.add_marker(pytest.mark.nightly)


def lacks(
    found: tuple[int, int] | None,
    gpus: int = 1,
    *,
    capability: tuple[int, int] | None = None,
    least: tuple[int, int] | None = None,
    alone: bool = False,
    count: int = 1,
) -> str | None:
    """Reason why a machine cannot run a test, or None.

    Args:
        found: compute capability of its GPU; None without one.
        gpus: how many it has.
        capability: the one that the test needs.
        least: the lowest that it needs.
        alone: it needs most of the GPU's memory, or its time, so it waits for the others.
        count: GPUs that it needs.
    """
    if found is None:
        return "needs a GPU"
    if capability not in (None, found):
        return "needs a GPU of compute capability {}.{}, this one has {}.{}".format(
            *capability, *found
        )
    if least is not None and found < least:
        return "needs a GPU of compute capability {}.{} or above, this one has {}.{}".format(
            *least, *found
        )
    if gpus < count:
        return f"needs {count} GPUs"
    return None
