"""The command that ``bisect`` suggests where an option of the runtime is to blame."""

import pytest

from dsa_compile.cli.inspect.bisect import WITHOUT, _next
from dsa_compile.cli.serve import _parser
from dsa_compile.verify.bisect.culprit import Cause, Culprit
from dsa_compile.verify.bisect.runtime_check import ANY
from dsa_compile.verify.bisect.runtime_scenes import (
    crowded_scenes,
    drafted_scenes,
    looked_up_scenes,
    prefix_scenes,
    scenes,
)
from dsa_compile.verify.checks.hazard_check import STREAMS

NO_FLAG = {"aborted requests", "failing requests", "deterministic"}
"""Settings without a flag: two are matters of clients and models, one is off by default."""


def suggested(name: str) -> str:
    return _next(Culprit(None, 1, 1, 0, cause=Cause.OPTION, name=name), "artifact")


def test_every_setting_has_a_flag_that_dsa_serve_takes() -> None:
    every = [
        *scenes(16, 32, 512, True),
        *prefix_scenes(16, 512, lambda prompt: prompt[:4]),
        *crowded_scenes(16, 512, True),
        *drafted_scenes(16, 32, 512),
        *looked_up_scenes(512),
    ]
    names = {name for scene in every for name in scene.without}
    assert names - WITHOUT.keys() == NO_FLAG
    for flags in WITHOUT.values():
        _parser().parse_args(["artifact", *flags.split()])


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("prefix reuse", "dsa-serve artifact --no-enable-prefix-caching"),
        (
            "prefix reuse with preemption with batching",
            "dsa-serve artifact --no-enable-prefix-caching --max-num-seqs 1",
        ),
        ("aborted requests", "dsa-inspect artifact bisect --against reference"),
        ("drafting", "dsa-serve artifact --draft none"),
    ],
)
def test_the_command_leaves_the_option_out_or_tests_it(name: str, command: str) -> None:
    assert suggested(name) == command


def test_what_is_wrong_whatever_the_options_is_tested_again() -> None:
    culprit = Culprit(None, 1, 1, 0, cause=Cause.RUNTIME, name=ANY)
    assert _next(culprit, "artifact") == "dsa-inspect artifact bisect --against reference"


@pytest.mark.parametrize("cause", [Cause.RUNTIME, Cause.EXPORT])
def test_what_verify_shows_too_is_verified_next(cause: Cause) -> None:
    culprit = Culprit(None, 1, 1, 0, cause=cause, name=STREAMS)
    assert _next(culprit, "artifact") == "dsa-inspect artifact verify"
