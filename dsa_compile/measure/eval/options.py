"""Options of an evaluation: measures, key selections, texts, sizes."""

from dataclasses import dataclass
from pathlib import Path

from dsa_compile.common.names import one_of
from dsa_compile.errors import UserError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.selections import DENSE, SELECTIONS, SPARSE

MEASURES = ("perplexity", "recall", "indexer", "mtp", "layers", "hf")
_CONTEXT = 1536


@dataclass(frozen=True)
class Options:
    """Options of one evaluation.

    Args:
        measures: of :data:`MEASURES`. ``layers`` needs ``reference``.
        selections: of :data:`~dsa_compile.measure.eval.selections.SELECTIONS`; how perplexity,
            recall and indexer overlap choose keys.
        texts: text files; none for the held-out set of the example.
        tokens: of text to score for perplexity, about.
        context: longest sequence; None for 1536 or four times ``index_topk``, whichever is more,
            if the model takes as many.
        distances: of recall, in tokens; None for multiples of ``index_topk``.
        prompts: of recall at each distance.
        sequences: for the indexer (at each length), the layers and MTP on text.
        greedy_prompts: to compare greedy generations with transformers.
        draft_prompts: whose greedy continuations are drafted.
        generate: tokens generated for a prompt.
        depth: drafts in a chain.
        reference: artifact that the layers are compared with.
        record: leave the acceptance of drafts in the artifact.
        seed: of everything drawn.
    """

    measures: tuple[str, ...] = ("perplexity", "recall", "indexer", "mtp")
    selections: tuple[str, ...] = (SPARSE, DENSE)
    texts: tuple[Path, ...] = ()
    tokens: int = 32_768
    context: int | None = None
    distances: tuple[int, ...] | None = None
    prompts: int = 40
    sequences: int = 4
    greedy_prompts: int = 32
    draft_prompts: int = 16
    generate: int = 32
    depth: int = 4
    reference: Path | None = None
    record: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _all_of("measure", self.measures, MEASURES)
        _all_of("selection", self.selections, SELECTIONS)
        least = {
            "tokens": 1,
            "context": 3,
            "prompts": 1,
            "sequences": 1,
            "greedy_prompts": 1,
            "draft_prompts": 1,
            "depth": 1,
            "generate": self.depth + 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise UserError(f"{name.replace('_', '-')} {value} must be at least {bound}")
        if any(distance < 1 for distance in self.distances or ()):
            raise UserError(f"distances {self.distances} must be at least 1")
        if self.record and "mtp" not in self.measures:
            raise UserError("--record is about drafts, and --only leaves them out; add mtp")
        if "layers" in self.measures and self.reference is None:
            raise UserError("the error of layers needs an artifact to compare with: --reference")

    def context_of(self, spec: ModelSpec) -> int:
        """The longest sequence for a model.

        Raises:
            UserError: the context is longer than the model takes.
        """
        limit = spec.max_position_embeddings
        if self.context is None:
            return min(limit, max(_CONTEXT, 4 * spec.index_topk))
        if self.context > limit:
            raise UserError(f"context {self.context} exceeds the model's limit of {limit} tokens")
        return self.context


def _all_of(what: str, given: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in given:
        one_of(what, value, allowed)
