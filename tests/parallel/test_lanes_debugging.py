"""What the tools that look into a program do with lanes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_compile.cli.inspect.command import main
from dsa_compile.debugging.recompiled_artifact import RecompiledArtifact
from dsa_compile.errors import UserError


@pytest.mark.slow
def test_lanes_of_several_ranks_are_not_verified_yet(artifact: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="compile with --tp or with --dp alone") as error:
        RecompiledArtifact.open(artifact("tp2dp2"))
    assert "\n" not in str(error.value)


def test_what_lanes_exchange_is_listed(artifact: Callable[[str], Path], capsys) -> None:
    assert main([str(artifact("dp2ep2")), "ranks"]) == 0
    out = capsys.readouterr().out
    assert "layout: dp2, ep2" in out
    # three MoE layers: 256 values, 4 weights and 4 choices a token, and the sums back
    sent = 3 * (256 * 4 + 4 * 4 + 4 * 8 + 256 * 4)
    assert f"a step: 12 messages, {sent:,} bytes sent by each rank" in out
