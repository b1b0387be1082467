"""Whatever passes are left out, the tokens are the same, or the refusal says who needs whom."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsa_compile.artifact import ArtifactWriter
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.passes import Pass
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.emit import emit
from dsa_compile.passes.manager import pass_names, run_pipeline
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.passes.selection import RUNTIME_REQUIRES
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.weights.checkpoint import Checkpoint

CONFIG = CompileConfig()
PASSES = {step.name: step for step in PIPELINE if isinstance(step, Pass) and step.runs(CONFIG)}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def with_users(names: set[str]) -> set[str]:
    """The passes and everything that directly or indirectly needs them."""
    while True:
        more = {p.name for p in PASSES.values() if names & set(p.requires)} - names
        if not more:
            return names
        names = names | more


OPTIONAL = [n for n in PASSES if not with_users({n}) & set(RUNTIME_REQUIRES)]


@pytest.fixture(scope="module")
def tokens(case, tmp_path_factory) -> Callable[[set[str]], list[list[int]]]:
    """``tokens(disabled)``: compile the small model without those passes and generate."""
    c = case("grouped-4-layers")
    config = CompileConfig(block_size=16)
    exported = build_program(c.model_dir, config)
    checkpoint = Checkpoint.open(c.model_dir, exported.spec, range(exported.spec.num_hidden_layers))
    # below, at and above index_topk, together and across it while generating
    prompts = c.prompts([3, c.topk - 4, c.topk + 1, 5 * c.topk], seed=5)

    def run(disabled: set[str]) -> list[list[int]]:
        out: Path = tmp_path_factory.mktemp("selection") / "artifact"
        program = exported.fork(replace(config, disable=tuple(sorted(disabled))))
        run_pipeline(program)
        with ArtifactWriter(out) as writer:
            emit(program, writer, c.model_dir, checkpoint, bind_kernels(program))
        outs = Engine.load(out, max_num_batched_tokens=50).generate(prompts, PARAMS)
        return [o.token_ids for o in outs]

    run.reference = [c.reference(prompt, PARAMS.max_tokens) for prompt in prompts]
    return run


def test_some_passes_are_optional_and_the_runtime_needs_some():
    assert set(OPTIONAL) >= {
        "recognize_embedding",
        "recognize_rms_norm",
        "recognize_layer_norm",
        "recognize_rope_tables",
        "recognize_rope_half",
        "recognize_swiglu",
        "merge_projections",
        "pack_swiglu",
        "fuse_add_norm",
        "fuse_add_norm_across_layers",
        "split_short_long",
    }
    assert set(pass_names()) >= set(RUNTIME_REQUIRES)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_alone_is_left_out_or_refused_by_name(tokens, name):
    users = with_users({name}) - {name}
    if not users and name not in RUNTIME_REQUIRES:
        assert tokens({name}) == tokens.reference
        return
    with pytest.raises(UserError, match=f"cannot disable '{name}'") as refused:
        tokens({name})
    assert any(user in str(refused.value) for user in users | {"the runtime"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPTIONAL if len(with_users({n})) > 1])
def test_a_pass_left_out_with_those_that_need_it(tokens, name):
    assert tokens(with_users({name})) == tokens.reference


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_subsets(tokens, seed):
    draw = random.Random(seed)
    subset = with_users(set(draw.sample(OPTIONAL, draw.randint(2, len(OPTIONAL)))))
    assert tokens(subset) == tokens.reference, subset


def test_every_optional_pass_left_out(tokens):
    assert tokens(set(OPTIONAL)) == tokens.reference
