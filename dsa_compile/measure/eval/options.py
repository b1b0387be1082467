"""Options of an evaluation: measures, key selections, texts, sizes."""

from dataclasses import dataclass
from pathlib import Path

from dsa_compile.common.names import one_of
from dsa_compile.common.option_keywords import has_options
from dsa_compile.common.options import check, option
from dsa_compile.errors import OptionValueError, UserError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.selections import DENSE, SELECTIONS, SPARSE

MEASURES = ("perplexity", "recall", "indexer", "mtp", "layers", "hf")
_CONTEXT = 1536


@has_options
@dataclass(frozen=True)
class Options:
    """Options of one evaluation.

    Args:
        measures: of :data:`MEASURES`. ``layers`` needs ``reference``.
        selections: of :data:`~dsa_compile.measure.eval.selections.SELECTIONS`; how perplexity,
            recall and indexer overlap choose keys.
    """

    measures: tuple[str, ...] = ("perplexity", "recall", "indexer", "mtp")
    selections: tuple[str, ...] = (SPARSE, DENSE)
    reference: Path | None = option(
        None, "measure the error after each layer against this artifact of the same model",
        metavar="ARTIFACT",
    )  # fmt: skip
    texts: tuple[Path, ...] = option(
        (), "UTF-8 text files, cut into windows of {context} tokens", several="words",
        metavar="FILE", flag="text", unset="the held-out text of examples/tiny_v32",
    )  # fmt: skip
    tokens: int = option(32_768, "of text to score for perplexity, about", unit="tokens", least=1)
    context: int | None = option(
        None, "tokens of the longest sequence", unit="tokens", least=3,
        unset=f"{_CONTEXT} or four times index_topk, the larger, within the model's limit",
    )  # fmt: skip
    distances: tuple[int, ...] | None = option(
        None, "of recall, in tokens", unit="tokens", least=1, several="commas",
        unset="1, 2, 4, 8, 12 and 16 times index_topk, as fits",
    )  # fmt: skip
    prompts: int = option(40, "recall prompts at each distance", least=1)
    sequences: int = option(
        4, "for the indexer (at each length), the layers, logits and drafts on text", least=1
    )
    greedy_prompts: int = option(32, "generations to compare with transformers", least=1)
    draft_prompts: int = option(16, "generations to draft along", least=1)
    generate: int = option(32, "tokens of a generation, more than {depth}", unit="tokens", least=2)
    depth: int = option(4, "drafts in a chain", least=1)
    record: bool = option(
        False, "leave in ARTIFACT how many drafts were right, by text and depth; an engine over it "
        "warns where fewer are",
    )  # fmt: skip
    seed: int = option(0, "of everything random")

    def __post_init__(self) -> None:
        _all_of("measure", self.measures, MEASURES)
        _all_of("selection", self.selections, SELECTIONS)
        check(self)
        if self.generate <= self.depth:
            raise OptionValueError("{generate} must be more than {depth}; got {}", self.generate)
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
