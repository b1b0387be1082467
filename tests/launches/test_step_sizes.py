"""Kernels met at the sizes that are rehearsed are those that steps of any size launch."""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import DeepseekV32Config

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.formats import RECIPES
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.kernels.cuda import topk
from dsa_compile.kernels.cuda.compiler import cubin_name
from dsa_compile.kernels.cuda.device import Rehearsal
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.launches.rehearsed_steps import BoundGraphs, rehearse_steps
from dsa_compile.launches.step_sizes import StepLimits, step_sizes
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.launched_kernels import bound_graphs, launched_kernels
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.loading.kernel_preparation import _resolve_token_ids
from examples.small_models.models import yarn_parameters

pytestmark = pytest.mark.slow
CONTEXT = 163_840
BLOCK = 64
# What steps hold other than what is rehearsed, of each kind.
DRAWS = 25


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Program]:
    """A dense and an MoE layer of the released geometry, exported once for each recipe."""
    model_dir = tmp_path_factory.mktemp("model")
    DeepseekV32Config(
        rope_parameters=yarn_parameters(), max_position_embeddings=CONTEXT
    ).save_pretrained(model_dir)

    @functools.cache
    def export(recipe: str) -> Program:
        return build_program(model_dir, CompileConfig(recipe=recipe, weights="none", layers=(2, 3)))

    def get(recipe: str, target: str) -> Program:
        program = export(recipe).fork(replace(export(recipe).config, target=target))
        run_pipeline(program)
        return program

    return get


def ours(kernel: Implementation) -> bool:
    return kernel.launches_ours


def sized(tokens: int, requests: int, rows: int, context: int, pages: int) -> dict[str, int]:
    columns = -(-context // BLOCK)
    return {"T": tokens, "R": requests, "R+1": requests + 1, "N": rows, "M": columns, "P": pages}


def other_steps(limits: StepLimits, seed: int = 0) -> Iterator[dict[str, int]]:
    """Decode steps, chunks of one prompt, and both in one step, within limits."""
    draw = random.Random(seed)
    most, rows = limits.tokens or CONTEXT, limits.requests or 4096

    def some(limit: int) -> int:
        """Small and large ones alike."""
        return min(limit, int(limit ** draw.random()) + draw.randint(0, 8) or 1)

    for _ in range(DRAWS):
        context = some(limits.context)
        pages = draw.choice([1, 1000, 4095, 70_001, 400_001])
        decoding = some(rows)
        yield sized(decoding, decoding, decoding, context, pages)
        chunk = some(most)
        yield sized(chunk, 1, 1, max(context, chunk), pages)
        # a few more tokens than attention takes at a time
        rest = min(most, 2048 * draw.randint(1, 4) + draw.randint(1, 40))
        yield sized(rest, 1, 1, max(context, rest), pages)
        requests = some(min(rows, most))
        mixed = min(most, requests + some(most))
        yield sized(mixed, requests, draw.randint(1, requests), context, pages)
        # a speculative step: as many tokens of each request
        requests, each = some(min(rows, most // 8 or 1)), draw.randint(1, 8)
        yield sized(min(most, requests * each), requests, requests, context, pages)


def builds(rehearsal: Rehearsal) -> set[tuple[Any, ...]]:
    """Everything that is compiled for what was noted."""
    cuda = {
        (kernel.name, cubin_name(kernel.source, arch=rehearsal.target, defines=kernel.defines))
        for kernel in rehearsal.kernels
    }
    return cuda | set(rehearsal.triton)


def rehearsed(graphs: BoundGraphs, steps: Any) -> set[tuple[Any, ...]]:
    return builds(rehearse_steps(graphs, steps, ours, also=(_resolve_token_ids,)))


@pytest.mark.parametrize(
    ("recipe", "target"), [*((recipe, "sm_90a") for recipe in RECIPES), ("fp8", "sm_100a")]
)
def test_steps_of_other_sizes_launch_no_other_kernels(compiled, recipe, target):
    """Steps of any size need the same kernels, and so do those within the limits of an engine."""
    program = compiled(recipe, target)
    bindings = bind_kernels(program)
    graphs = bound_graphs(program, bindings)
    everything = rehearsed(graphs, step_sizes(StepLimits(CONTEXT), BLOCK))
    assert len(everything) > 15
    missed = rehearsed(graphs, other_steps(StepLimits(CONTEXT))) - everything
    assert sorted(map(str, missed)) == []

    limits = StepLimits(context=20_000, tokens=3000, requests=300)
    ready = rehearsed(graphs, step_sizes(limits, BLOCK))
    missed = rehearsed(graphs, other_steps(limits, seed=1)) - ready
    assert sorted(map(str, missed)) == []
    assert ready <= everything, "an artifact ships what any engine makes ready"

    shipped = set(launched_kernels(program, bindings))
    noted = rehearse_steps(graphs, step_sizes(limits, BLOCK), ours).kernels
    assert set(noted) <= shipped


def test_captured_decode_steps_are_among_those_rehearsed():
    plan = GraphPlan.of(max_num_seqs=200, max_model_len=50_000, block_size=BLOCK, topk=2048)
    sizes = list(step_sizes(StepLimits(50_000, 2048, 200), BLOCK))
    rehearsed_rows = {step["T"] for step in sizes if step["T"] == step["R"]}
    assert set(plan.rows) <= rehearsed_rows
    assert max(plan.columns["long"]) == max(step["M"] for step in sizes)


@pytest.mark.parametrize("context", [4096, 9000, 32_768, CONTEXT])
def test_top_k_has_a_bounded_number_of_builds(context):
    """All numbers of rows and all widths up to a context need a dozen builds, and the sizes that
    are rehearsed meet each."""
    plan = topk.plan.__wrapped__
    bounds = sorted({most + step for most, _, _ in topk._CHOICES for step in (0, 1)})
    rows = [1, *(count for count in bounds if count <= topk.MAX_ROWS)]
    columns = range(BLOCK, context + BLOCK, BLOCK)
    possible = {plan(count, width) for count in rows for width in columns}
    assert possible <= set(topk.variants())
    met = {plan(step["T"], step["M"] * BLOCK) for step in step_sizes(StepLimits(context), BLOCK)}
    assert met == possible
