"""Kernels against references: healthy ones pass, wrong ones are named."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.frontend.architectures import spec_of
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.kernels.registry import load
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.ops.pointwise import pointwise
from dsa_compile.runtime.execution import executor
from dsa_compile.verify.checks import kernel_by_op
from dsa_compile.verify.checks.kernel_call import OpCall
from dsa_compile.verify.checks.kernel_check import KernelReport, check_kernels, wrong_kernels
from dsa_compile.verify.comparison.kernel_errors import KernelError
from dsa_compile.verify.inputs.prompt import Chunk, Part
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.passes.sketch import region, value, weight

TOKENS = 27


@pytest.fixture(scope="module", params=["fp32", "fp8"])
def opened(request: Any, model_dir: Path, tmp_path_factory: Any) -> RecompiledArtifact:
    """The small model in a recipe without and one with quantised caches."""
    path = tmp_path_factory.mktemp("kernels") / "artifact"
    compile_model(model_dir, path, recipe=request.param, block_size=16, records=False)
    return RecompiledArtifact.open(path)


def found(opened: RecompiledArtifact) -> list[KernelReport]:
    manifest = opened.artifact.manifest
    prompt = opened.prompt(None, TOKENS)
    args = (opened.replay.final, manifest.kernels, manifest.target, opened.store.source, prompt)
    return list(check_kernels(*args))


def test_references_are_right(opened: RecompiledArtifact) -> None:
    reports = found(opened)
    assert [str(report) for report in reports if report.problem] == []
    called = {
        str(node.target)
        for region in opened.replay.final.regions.values()
        for node in region.graph.nodes
        if str(node.target).startswith("dsa.")
    }
    assert called - {"dsa.on_stream.default"} <= {report.op for report in reports}
    assert {report.layer for report in reports} == {"embed", 0, 1, "head"}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``plant(op, wrong)``: ``wrong(results, args)`` changes what an op's kernel did, in place."""

    def planted(op: str, wrong: Callable[[Any, tuple[Any, ...]], None]) -> None:
        def loaded(name: str, provider: str, target: str) -> Callable[..., Any] | None:
            right = load(name, provider, target)
            assert right is not None
            if name != op:
                return right

            def kernel(*args: Any) -> Any:
                results = right(*args)
                wrong(results, args)
                return results

            return kernel

        monkeypatch.setattr(kernel_by_op, "load", loaded)

    return planted


def last_row(results: Any, args: tuple[Any, ...]) -> None:
    """The error of a tile's tail."""
    results[-1] += results[-1].abs().mean() / 4


def scaled(results: Any, args: tuple[Any, ...]) -> None:
    """A softmax scale that is off."""
    results *= 1.02


def two_experts(results: Any, args: tuple[Any, ...]) -> None:
    """The choice of two tokens exchanged."""
    results[1][:2] = results[1][:2].flip(0)


def other_key(results: Any, args: tuple[Any, ...]) -> None:
    """The best key of a row left out for one that is the request's but not visible."""
    results[0, 0] = results[-1, results.shape[1] - 1]


def beside(results: Any, args: tuple[Any, ...]) -> None:
    """A row of the cache that belongs to nobody."""
    cache = next(a for a in args if isinstance(a, torch.Tensor) and a.dim() == 3)
    cache.view(-1, cache.shape[2])[-1] = 1


SEEN = {
    "linear": last_row,
    "embedding": last_row,
    "absorb_rope_query": lambda results, args: scaled(results[0], args),
    "router": two_experts,
    "paged_index_topk": other_key,
    "paged_index_topk_fp8": other_key,
    "write_latent_cache": beside,
}


@pytest.mark.slow
@pytest.mark.parametrize("op", SEEN)
def test_a_wrong_kernel_is_named(
    opened: RecompiledArtifact, plant: Callable[..., None], op: str
) -> None:
    program, manifest = opened.replay.final, opened.artifact.manifest
    if f"dsa.{op}.default" not in manifest.kernels:
        pytest.skip("not in this recipe")
    plant(op, SEEN[op])
    prompt = opened.prompt(None, TOKENS)

    def wrong() -> Iterator[str]:
        for report in wrong_kernels(program, manifest.kernels, "cpu", opened.store, prompt):
            yield report.op

    assert set(wrong()) == {f"dsa.{op}.default"}


@pytest.mark.slow
def test_a_kernel_that_raises_in_a_later_layer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps before the last one are not checked op by op in the second of two equal layers."""
    model, path = tmp_path / "model", tmp_path / "artifact"
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=0)), model)
    compile_model(model, path, recipe="fp32", block_size=16, records=False)
    opened = RecompiledArtifact.open(path)
    weights: list[torch.Tensor] = []

    def loaded(name: str, provider: str, target: str) -> Callable[..., Any] | None:
        right = load(name, provider, target)
        if name != "router" or right is None:
            return right

        def kernel(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
            if not any(torch.equal(weight, other) for other in weights):
                weights.append(weight.clone())
            if len(weights) == 2 and len(x) > 1:
                raise RuntimeError("no such table")
            return right(x, weight, *args)

        return kernel

    for module in (kernel_by_op, executor):
        monkeypatch.setattr(module, "load", loaded)
    wrong = [report for report in found(opened) if report.problem]
    assert {report.layer for report in wrong} == {1}
    assert "does not run: RuntimeError: no such table" in wrong[0].problem
    assert wrong[0].op == "dsa.router.default"


def test_what_is_not_finite_has_no_size() -> None:
    assert "not finite" in KernelError(math.inf, 1e-3, math.inf).problem
    assert "inf" not in KernelError(0.5, 1e-3, 0.5).problem


ROTATED = json.dumps({
    "inputs": 4,
    "calls": [["aten.mul.Tensor", ["%0", "%1"]], ["aten.mul.Tensor", ["%0", "%2"]],
              ["aten.add.Tensor", ["%4", "%5"]], ["aten.mul.Tensor", ["%6", "%3"]]],
    "results": ["%7"],
})  # fmt: skip


@pytest.mark.parametrize(("wrong", "problem"), [(1.0, ""), (1.5, "differs by")])
def test_a_chain_that_rounds_less_than_its_reference_is_right(wrong: float, problem: str) -> None:
    """Its operands are a list, some with a row for every token and some without."""
    narrow = torch.bfloat16
    shapes = [value(name, "T", 16, dtype=narrow) for name in ("x", "cos", "sin")]

    @region("dense", *shapes, weight("scale", 16, dtype=narrow))
    def sketch(x: Any, cos: Any, sin: Any, scale: Any) -> Any:
        return torch.ops.dsa.pointwise.default([x, cos, sin, scale], ROTATED)[0]

    graph = sketch.trace(FakeWorld()).graph
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dsa.pointwise.default)
    made = torch.Generator().manual_seed(0)
    x, cos, scale = (torch.randn(n, 16, generator=made) for n in (TOKENS, TOKENS, 1))
    sin = -cos * (1 + torch.randn(TOKENS, 16, generator=made) / 20)  # terms that almost cancel
    given = [t.to(narrow) for t in (x, cos, sin, scale[0])]
    chunk = Chunk((Part(0, 0, TOKENS),))
    call = OpCall(node, (given, ROTATED), chunk, spec_of(tiny_config(2).to_dict()))

    def once(inputs: list[torch.Tensor], program: str) -> list[torch.Tensor]:
        rounded = pointwise([t.float() for t in inputs], program)
        return [(wrong * result).to(narrow) for result in rounded]

    found, ratio = call.judge(call.reference(), call.kernel(once))
    assert found.startswith(problem)
    assert (ratio > 1) is bool(found) is bool(problem)
