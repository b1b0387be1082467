"""Agreement of two models: of their logits on the same text, of their greedy generations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from dsa_compile.measure.eval.progress import Tick, ignore
from dsa_compile.runtime.engine import Engine
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.runner import Runner
from dsa_compile.runtime.requests.sampling_params import SamplingParams


@dataclass(frozen=True)
class LogitAgreement:
    """Logits of a model against a reference's, for the same tokens.

    Attributes:
        against: the reference.
        tokens: compared.
        max_abs: largest difference of a logit.
        kl: mean of KL(reference || model), nats.
        same_top: share of tokens after which both rank the same token first.
    """

    against: str
    tokens: int
    max_abs: float
    kl: float
    same_top: float


@dataclass(frozen=True)
class GreedyAgreement:
    """Greedy generations of a model and of a reference from the same prompts.

    Attributes:
        against: the reference.
        prompts: how many.
        identical: prompts continued with the same tokens to the end.
        tokens: generated for all prompts by each.
        matching: tokens before the first difference, over all prompts.
        first_different: number of the first prompt continued differently, or None.
    """

    against: str
    prompts: int
    identical: int
    tokens: int
    matching: int
    first_different: int | None


def compare_logits(
    against: str, model: Iterable[Tensor], reference: Iterable[Tensor]
) -> LogitAgreement:
    """Compare logits [n, V], sequence by sequence; the divergences are summed in fp64."""
    tokens, same, largest, divergence = 0, 0, 0.0, 0.0
    for ours, theirs in zip(model, reference, strict=True):
        tokens += len(ours)
        largest = max(largest, (ours - theirs).abs().max().item())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        log_p, log_q = log_softmax(theirs.double(), -1), log_softmax(ours.double(), -1)
        divergence += kl_div(log_q, log_p, log_target=True, reduction="sum").item()
    return LogitAgreement(against, tokens, largest, divergence / tokens, same / tokens)


def compare_generations(
    against: str, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> GreedyAgreement:
    """Compare token by token; both generate the same number of tokens for a prompt."""
    matching = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(ours, theirs, strict=True)
    ]
    same = [match == len(a) for match, a in zip(matching, ours, strict=True)]
    return GreedyAgreement(
        against=against,
        prompts=len(ours),
        identical=sum(same),
        tokens=sum(map(len, ours)),
        matching=sum(matching),
        first_different=None if all(same) else same.index(False),
    )


def generate_greedily(
    runner: Runner, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """``count`` likeliest tokens after each prompt, end tokens taken as any other.

    All prompts are served together by the runtime's engine.
    """
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    outputs = Engine(runner, EngineOptions()).generate([list(p) for p in prompts], params)
    return [output.token_ids for output in outputs]


def measure_generations(
    against: str,
    runner: Runner,
    reference: Callable[[Sequence[Sequence[int]], int], list[list[int]]],
    prompts: Sequence[Sequence[int]],
    count: int,
    tick: Tick = ignore,
) -> GreedyAgreement:
    """Generate ``count`` tokens for every prompt on both sides and compare.

    Args:
        against: what to call the reference.
        runner: of the artifact.
        reference: prompts and a count to the tokens generated.
        prompts: token ids.
        count: tokens to generate for each.
        tick: called as the measurement goes on.
    """
    theirs = reference(prompts, count)
    tick(0.5)
    return compare_generations(against, generate_greedily(runner, prompts, count), theirs)
