"""Debugging and inspecting tools on programs with lanes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_compile.cli.inspect.command import main


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--against-unsharded"]], ids=["verify", "unsharded"])
def test_lanes_of_several_ranks_are_verified(
    artifact: Callable[[str], Path], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    asked = [str(artifact("tp2dp2")), "verify", "--tokens", "40", "--json", *options]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_what_lanes_exchange_is_listed(artifact: Callable[[str], Path], capsys) -> None:
    assert main([str(artifact("dp2ep2")), "ranks"]) == 0
    out = capsys.readouterr().out
    assert "layout: dp2, ep2" in out
    # three MoE layers: 256 values, 4 weights and 4 choices a token, and the sums back
    sent = 3 * (256 * 4 + 4 * 4 + 4 * 8 + 256 * 4)
    assert "a step: 6 messages; for a token whose logits are wanted each rank sends" in out
    assert f"sends {sent:,} bytes" in out
