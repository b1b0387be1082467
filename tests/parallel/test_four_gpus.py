"""Four ranks on four GPUs, by NCCL and by kernels of our own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from tests.trained import trained_model

from .test_rank_group_gpu import GREEDY, OPTIONS, tokens

pytestmark = pytest.mark.gpu(capability=(9, 0), count=4)
LAYOUTS = {
    "one": ONE_RANK,
    "tp4": Layout(tp=4, shard_embedding=True),
    "tp2dp2": Layout(tp=2, dp=2, ep=4),
    "dp4ep4": Layout(dp=4, ep=4),
}
SEVERAL = [name for name in LAYOUTS if name != "one"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def artifact(layout: str, recipe: str) -> Path:
        if (layout, recipe) not in made:
            path = made[layout, recipe] = tmp_path_factory.mktemp("four") / f"{layout}-{recipe}"
            compile_model(
                trained_model(), path, target="sm_90a", recipe=recipe, layout=LAYOUTS[layout]
            )
        return made[layout, recipe]

    return artifact


@pytest.mark.parametrize("layout", SEVERAL)
def test_four_gpus_give_the_tokens_of_one(compiled, layout: str) -> None:
    """In fp32, whose rows our kernels exchange and NCCL sums."""
    wanted = tokens(compiled("one", "fp32"), GREEDY, deterministic=True)
    for collectives in ("nccl", "symmetric"):
        found = tokens(compiled(layout, "fp32"), GREEDY, collectives=collectives)
        assert found == wanted, collectives


def prompt_logprobs(path: Path, **options) -> torch.Tensor:
    """Log-probabilities of each token of two prompts, of few rows and of many."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with Engine.load(path, **{**OPTIONS, **options}) as engine:
        outputs = engine.generate([[5, 6, 7], list(range(3, 150))], params)
        found = [entry.logprob for output in outputs for entry in output.prompt_logprobs]
    return torch.tensor(found)


@pytest.mark.parametrize("layout", SEVERAL)
def test_sums_of_four_in_bf16(compiled, layout: str) -> None:
    """NCCL adds in an order of its own: as near to one rank as that, and the same each time."""
    one = prompt_logprobs(compiled("one", "bf16"))
    nccl, ours, again = (
        prompt_logprobs(compiled(layout, "bf16"), collectives=name)
        for name in ("nccl", "symmetric", "symmetric")
    )
    assert torch.equal(ours, again)
    by_nccl = (nccl - one).abs().mean()
    assert (ours - one).abs().mean() < 2 * by_nccl + 0.01
