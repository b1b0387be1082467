"""The command that ``bisect`` suggests where no rewrite is to blame, and the file that it names."""

from pathlib import Path

import pytest

from dsa_compile.cli.inspect.bisect import RUNTIME, _next
from dsa_compile.cli.serve import _parser
from dsa_compile.verify.bisect.culprit import Cause, Culprit
from dsa_compile.verify.bisect.localise import Finding
from dsa_compile.verify.bisect.runtime_check import ANY
from dsa_compile.verify.bisect.runtime_scenes import (
    crowded_scenes,
    drafted_scenes,
    looked_up_scenes,
    prefix_scenes,
    scenes,
)
from dsa_compile.verify.checks.hazard_check import STREAMS
from dsa_compile.verify.comparison.agreement import Agreement

ROOT = Path(__file__).parents[2]


def suggested(cause: Cause, name: str = "", findings: tuple[Finding, ...] = ()) -> str:
    culprit = Culprit(None, 1, 1, 0, findings=findings, cause=cause, name=name)
    return _next(culprit, "artifact", ["fuse_add_norm"])


def test_every_setting_has_a_file_and_flags_that_dsa_serve_takes() -> None:
    every = [
        *scenes(16, 32, 512, True),
        *prefix_scenes(16, 512, lambda prompt: prompt[:4]),
        *crowded_scenes(16, 512, True),
        *drafted_scenes(16, 32, 512),
        *looked_up_scenes(512),
    ]
    assert {ANY, *(name for scene in every for name in scene.without)} == RUNTIME.keys()
    for file, flags in RUNTIME.values():
        assert (ROOT / file).is_file()
        _parser().parse_args(["artifact", *flags.split()])


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("prefix reuse", "dsa-serve artifact --no-enable-prefix-caching"),
        (
            "prefix reuse with preemption with batching",
            "dsa-serve artifact --no-enable-prefix-caching --max-num-seqs 1",
        ),
        ("aborted requests", "dsa-serve artifact"),
        ("drafting", "dsa-serve artifact --draft none"),
    ],
)
def test_the_command_leaves_the_option_out(name: str, command: str) -> None:
    assert suggested(Cause.OPTION, name) == command


def test_a_pass_that_could_not_be_run_left_no_difference_to_show() -> None:
    assert suggested(Cause.PASS, "fuse_add_norm") == "dsa-inspect artifact diff fuse_add_norm"
    assert suggested(Cause.PASS, "shard_experts") == "dsa-inspect artifact graph"


@pytest.mark.parametrize(("layer", "flag"), [(3, "--layer 3"), ("head", "--kind head")])
def test_an_export_fault_leads_to_the_first_graph_that_has_it(layer: int | str, flag: str) -> None:
    found = (Finding(layer, Agreement(False, 1.0), "differs"),)
    assert suggested(Cause.EXPORT, findings=found) == f"dsa-inspect artifact graph {flag}"


@pytest.mark.parametrize("cause", [c for c in Cause if c not in (Cause.NONE, Cause.REWRITE)])
def test_nothing_leads_back_to_where_it_was_found(cause: Cause) -> None:
    """``verify`` sends what it cannot explain to ``bisect``, and says more of hazards and files."""
    names = {Cause.OPTION: ["batching"], Cause.RUNTIME: [ANY, STREAMS]}.get(cause, ["x"])
    for name in names:
        command = suggested(cause, name)
        assert "bisect" not in command
        assert ("verify" in command) == (cause is Cause.ARTIFACT or name == STREAMS)
