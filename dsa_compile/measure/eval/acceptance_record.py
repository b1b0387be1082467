"""Record in an artifact of the acceptance that was measured, for engines to compare with."""

from collections.abc import Mapping, Sequence

from dsa_compile.artifact.acceptance import AcceptanceRecord, Counted, MeasuredText
from dsa_compile.measure.eval.engine_acceptance import Comparison, DraftingEngine, answer
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.runtime.requests.sampling_params import SamplingParams


def record_acceptance(
    loaded: LoadedArtifact,
    engine: DraftingEngine,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    greedy: Mapping[str, Comparison],
    generate: int,
) -> AcceptanceRecord:
    """Leave the drafts of an engine's steps in the artifact, along greedy and sampled answers.

    Args:
        loaded: the artifact.
        engine: over it, that was compared.
        prompts: token ids by text.
        greedy: what was compared, by text.
        generate: tokens of a sampled answer.

    Raises:
        UserError: the record cannot be written.
    """
    texts = []
    for text, some in prompts.items():
        depth = greedy[text].depth
        lengths = [[step.accepted for step in steps] for steps in greedy[text].answers]
        texts.append(MeasuredText(text, sampled=False, depths=counted(lengths, depth)))
        drawn = []
        for seed, prompt in enumerate(some):
            params = SamplingParams(
                max_tokens=generate, temperature=1.0, seed=seed, ignore_eos=True
            )
            drawn.append(answer(engine, prompt, params, depth).accepted)
        texts.append(MeasuredText(text, sampled=True, depths=counted(drawn, depth)))
    record = AcceptanceRecord.of(loaded.manifest.digest, tuple(texts))
    record.write(loaded.artifact.path)
    return record


def counted(answers: Sequence[Sequence[int]], depth: int) -> tuple[Counted, ...]:
    """Drafts by depth, with the dispersion of the depth that varies most from answer to answer.

    Args:
        answers: for each of them and each of its steps, how many drafts were right.
        depth: drafts of a step.
    """
    sizes = [len(steps) for steps in answers]
    by_depth = [
        [sum(length >= place for length in steps) for steps in answers]
        for place in range(1, depth + 1)
    ]
    dispersion = max(_dispersion(sizes, right) for right in by_depth)
    return tuple(Counted(sum(sizes), sum(right), dispersion) for right in by_depth)


def _dispersion(sizes: Sequence[int], right: Sequence[int]) -> float:
    """Variance of a share between answers over that of independent drafts, >= 1."""
    answers, drafts = sum(map(bool, sizes)), sum(sizes)
    if answers < 2 or sum(right) in (0, drafts):
        return 1.0
    share = sum(right) / drafts
    squares = sum((n - size * share) ** 2 for size, n in zip(sizes, right, strict=True))
    return max(1.0, squares / (drafts * share * (1 - share)) * answers / (answers - 1))
