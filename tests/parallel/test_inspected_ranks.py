"""Program of several ranks in ``dsa-inspect``: messages, and one rank's graph."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.artifact.reader import Artifact
from dsa_compile.cli.eval import main as eval_main
from dsa_compile.cli.inspect.command import main
from dsa_compile.errors import UserError
from dsa_compile.inspect.html.payload import payload
from dsa_compile.inspect.store import Store
from dsa_compile.ir.plan import DRAFT
from dsa_compile.measure.step.drafted import time_drafted_steps
from tests.trained import trained_model

Artifacts = Callable[[str], Path]


def test_graph_shows_what_a_collective_sends(
    artifact: Artifacts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(artifact("tp2")), "graph", "--layer", "3", "--variant", "long"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "all_reduce(" in line]
    assert len(lines) == 2
    assert all("2 ranks (tp): 1,024 bytes a row, 1,024 sent" in line for line in lines)


def test_report_has_what_collectives_exchange(artifact: Artifacts) -> None:
    data = payload(Store.open(artifact("tp2")))
    found = {line["k"]: line["x"] for line in data["lines"] if "x" in line}
    assert found.keys() == {"dsa.all_reduce", "dsa.all_gather"}
    assert found["dsa.all_reduce"] == "2 ranks (tp): 1,024 bytes a row, 1,024 sent"


def test_onnx_is_the_graph_of_one_rank(
    artifact: Artifacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx = pytest.importorskip("onnx")
    file = tmp_path / "rank.onnx"
    chosen = ["onnx", "--layer", "3", "-o", str(file)]
    assert main([str(artifact("tp2")), *chosen, "--weights", "--rank", "1"]) == 0
    assert "the graph of one rank of tp2, embedding sharded, with the weights of rank 1" in (
        capsys.readouterr().out
    )
    model = onnx.load(file)
    sums = [n for f in model.functions for n in f.node if n.op_type == "all_reduce"]
    attributes: list[dict[str, Any]] = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in sums
    ]
    assert [(a["axis"], a["ranks"]) for a in attributes] == [(b"tp", 2)] * 2
    assert {node.domain for node in sums} == {"dsa"}
    [o_proj] = [w for w in model.graph.initializer if "o_proj" in w.name]
    assert list(o_proj.dims) == [256, 128]  # of 256 × 256, the columns of rank 1
    reference = _weights_of_model("model.layers.3.self_attn.o_proj.weight")
    assert (onnx.numpy_helper.to_array(o_proj) == reference[:, 128:].numpy()).all()


def _weights_of_model(key: str) -> Any:
    from safetensors import safe_open

    for file in trained_model().glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if key in opened.keys():  # noqa: SIM118
                return opened.get_tensor(key).float()
    raise AssertionError(key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "1"], "--rank goes with --weights"),
        (["--rank", "2", "--weights"], "--rank 2: the artifact has ranks 0 to 1"),
    ],
)
def test_ranks_that_are_not_there_are_refused(
    artifact: Artifacts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert main([str(artifact("tp2")), "onnx", "-o", str(tmp_path / "f.onnx"), *options]) == 2
    assert message in capsys.readouterr().err


def test_comparison_needs_several_ranks(
    artifact: Artifacts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(artifact("one")), "verify", "--against-unsharded"]) == 2
    assert "compiled for one rank, so there is nothing to compare it with" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_comparison_of_an_artifact(artifact: Artifacts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(artifact("ep2")), "verify", "--against-unsharded", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [done["name"] for done in report["passes"]][:1] == ["place"]
    assert "recognize_experts" not in {done["name"] for done in report["passes"]}


def test_what_runs_one_rank_says_so(
    artifact: Artifacts, capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifact("tp2")
    assert eval_main([str(path), "--only", "perplexity", "--quiet"]) == 2
    refused = "compiled for tp2, embedding sharded, and dsa-eval runs one rank"
    assert refused in capsys.readouterr().err
    manifest = Artifact.open(path, verify="header").manifest
    drafting = replace(manifest, plans={**manifest.plans, DRAFT: ()})
    with pytest.raises(UserError, match="and dsa-bench drafts runs one rank; compile"):
        next(time_drafted_steps(path, drafting, [1], [1], 16, 1))
