"""Other models with sparse attention: greedy tokens are those of their own classes.

As in ``test_exact``, with fewer compilations: each artifact serves all tests of its geometry.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.loading.load_runner import load_runner
from examples.small_models.models import (
    dequantised_twin,
    save_hf,
    save_hub,
    tiny_axk2_config,
    tiny_glm_config,
    tiny_mistral_config,
    tiny_model,
)

from .conftest import FAMILY, Case
from .test_exact import one_request
from .test_fp8 import QUANTISATION, SHORT, error, logits, prompt

pytestmark = pytest.mark.slow
TOKENS = 12
ROUNDING = 3e-6  # of index scores in fp32
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("name", FAMILY)
def test_tokens_from_one_token_to_eight_times_topk(case: Callable[[str], Case], name: str) -> None:
    """Across topk while generating, too; dense attention gives other tokens beyond it."""
    c = case(name)
    k = c.topk
    lengths = [1, 2, k - 5, k - 1, k, k + 1, 3 * k + 7, 8 * k]
    prompts = [settled(c, length) for length in lengths]
    engine = Engine.load(c.artifact)
    found = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert found == [c.reference(prompt, TOKENS) for prompt in prompts]
    with attending_to_all(c):
        dense = [c.reference(prompt, TOKENS) for prompt in prompts]
    assert found[:2] == dense[:2]
    assert found[-1] != dense[-1]


@pytest.mark.parametrize("name", FAMILY)
def test_tokens_of_thirty_two_requests_in_a_small_cache(
    case: Callable[[str], Case], name: str
) -> None:
    """Prefill in chunks, decode between them, prefixes found in the cache, preempted requests."""
    c = case(name)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 6 * c.topk, (30,), generator=generator).tolist()
    prompts = [settled(c, length, seed=100 * i) for i, length in enumerate(lengths)]
    prompts += [settled(c, lengths[i], before=prompts[0]) for i in (1, 2)]
    engine = Engine.load(c.artifact, max_num_batched_tokens=57, num_gpu_blocks_override=c.topk)
    found = [out.token_ids for out in engine.generate(prompts, GREEDY)]
    assert found == [c.reference(prompt, TOKENS) for prompt in prompts]
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


def settled(c: Case, length: int, before: Sequence[int] = (), seed: int = 0) -> list[int]:
    """A random prompt behind ``before`` for which rounding decides no selection."""
    for attempt in range(50):
        found = [*before, *c.prompts([length], seed + attempt)[0]]
        if cut_margin(c, found + c.reference(found, TOKENS)) > ROUNDING:
            return found
    raise AssertionError(f"no prompt of {length} tokens without a near-tie")


def cut_margin(c: Case, tokens: list[int]) -> float:
    """The least that the last key selected scores above the first left out, over all tokens."""
    scores: list[torch.Tensor] = []
    plain = torch.Tensor.topk

    def recorded(self: torch.Tensor, k: int, *rest: Any, **more: Any) -> Any:
        if self.dim() == 3 and self.shape[1] == self.shape[2] > c.topk:
            scores.append(plain(self[0, c.topk :], c.topk + 1).values)
        return plain(self, k, *rest, **more)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", recorded)
        c.model(torch.tensor([tokens]), use_cache=False)
    return min((float((s[:, -2] - s[:, -1]).min()) for s in scores), default=1.0)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """GLM in FP8 blocks over several files, with a layer for drafts: the model and where it is."""
    path = tmp_path_factory.mktemp("glm") / "model"
    model = tiny_model(tiny_glm_config(5), dtype=torch.bfloat16)
    save_hub(model, path)
    return dequantised_twin(model), path


@pytest.mark.parametrize("recipe", ["fp8", "fp8-kv-tensor"])
def test_published_fp8_blocks(published: tuple[Any, Path], recipe: str, tmp_path: Path) -> None:
    model, path = published
    made = compile_model(path, tmp_path / "artifact", recipe=recipe, block_size=16)
    assert any(note.startswith("MTP layer 5: ") for note in made.notes)
    owned = {kind: [c.key for c in caches] for kind, caches in made.manifest.caches.items()}
    both = ["latent_cache", "index_cache"]
    assert owned == {"dense": both, "moe": both, "moe_reuse": both[:1]}
    with torch.no_grad():
        want = model(torch.tensor([prompt(SHORT)]), use_cache=False).logits[0]
    assert error(logits(tmp_path / "artifact", SHORT), want) < QUANTISATION
    # beyond the selection, where rounding decides it, a step of many tokens and many steps agree
    runner = load_runner(tmp_path / "artifact", EngineOptions(num_gpu_blocks_override=40))
    pieces = [
        runner.execute(one_request(prompt(60), start, 12, runner.block_size)).float()
        for start in range(0, 60, 12)
    ]
    assert error(torch.cat(pieces), logits(tmp_path / "artifact", 60)) < QUANTISATION


@pytest.mark.parametrize("config", [tiny_glm_config, tiny_axk2_config, tiny_mistral_config])
def test_logits_in_bf16(config: Callable[[], Any], tmp_path: Path) -> None:
    """No further from exact arithmetic than the reference in bf16, at the median token: a token
    whose experts are chosen otherwise, in either, tells nothing."""
    try:
        model = tiny_model(config(), dtype=torch.bfloat16)
    except ImportError as error:
        pytest.skip(f"transformers has no such model: {error}")
    save_hf(model, tmp_path / "model")
    compile_model(tmp_path / "model", tmp_path / "artifact", block_size=16, recipe="bf16")
    exact = copy.deepcopy(model).float()
    runner = load_runner(tmp_path / "artifact", EngineOptions(num_gpu_blocks_override=40))
    ours, theirs = [], []
    for seed in range(16):
        tokens = prompt(SHORT, seed)
        got = runner.execute(one_request(tokens, 0, SHORT, runner.block_size))
        with torch.no_grad():
            want = exact(torch.tensor([tokens]), use_cache=False).logits[0]
            reference = model(torch.tensor([tokens]), use_cache=False).logits[0]
        ours.append((got - want).norm(dim=1) / want.norm(dim=1))
        theirs.append((reference - want).norm(dim=1) / want.norm(dim=1))
    assert torch.cat(ours).median() <= 1.1 * torch.cat(theirs).median()


@contextmanager
def attending_to_all(c: Case) -> Iterator[None]:
    """While it lasts, the reference's indexers select every key."""
    indexers = [module for module in c.model.modules() if hasattr(module, "index_topk")]
    topk = c.topk
    for indexer in indexers:
        indexer.index_topk = 10**6
    yield
    for indexer in indexers:
        indexer.index_topk = topk
