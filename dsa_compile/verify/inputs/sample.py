"""Sample of a model too wide for exact arithmetic: some experts and heads, one layer of a kind.

Experts of a layer are equal but for their weights, and so are heads. Graphs do not count them, the
tokens of the vocabulary or the keys that are selected: a model with fewer is compiled by the same
rewrites.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.frontend.build import program_plans
from dsa_compile.ir.plan import MODEL
from dsa_compile.ops.quantize import BLOCK
from dsa_compile.weights.canonical import canonical_parameters

WIDE_BYTES = 4 << 30
"""Bytes in exact arithmetic of a layer, or of the embedding, from which on a model is wide."""

EXPERTS = 8
"""Routed experts of a layer that are kept."""

KEPT_BYTES = 6 << 30
"""Exact weights that are kept from stage to stage: both sides of a rewrite of all experts."""

_TOKENS = 4096  # of the vocabulary
_SELECTED = 16  # keys a token
_HEADS = 16  # of attention, at least
# Heads of the indexer, at least: the score of a key that none of them looks at is 0, and equal
# scores may be selected in any order.
_INDEX_HEADS = 32


@dataclass(frozen=True)
class Sample:
    """A part of a model.

    Attributes:
        whole: geometry of the model.
        experts: numbers of the routed experts that are kept.
        tokens: ids of the tokens that are kept; those of a prompt are among them.
        sizes: fields of the configuration that the smaller model has otherwise.
        layers: the first and the last layer that is kept.
        among: the first and the last layer of the artifact.
    """

    whole: ModelSpec
    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    sizes: dict[str, int]
    layers: tuple[int, int]
    among: tuple[int, int]

    def numbers_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids of tokens in the smaller vocabulary."""
        places = {token: place for place, token in enumerate(self.tokens)}
        return tuple(places[token] for token in ids)

    def __str__(self) -> str:
        whole, sizes = self.whole, {**asdict(self.whole), **self.sizes}
        parts = []
        first, last = self.layers
        if any(whole.kind_of(n).mlp == "experts" for n in range(first, last + 1)):
            parts.append(
                f"{len(self.experts)} of {whole.n_routed_experts} experts a layer, "
                f"{sizes['num_experts_per_tok']} of them a token in place of "
                f"{whole.num_experts_per_tok}"
            )
            if sizes["n_group"] != whole.n_group:
                parts.append(f"{sizes['n_group']} groups of experts in place of {whole.n_group}")
        if self.layers != self.among:
            named = f"layer {first}" if first == last else f"layers {first}-{last}"
            parts.append(f"{named} of {self.among[0]}-{self.among[1]}")
        for name, shown in (("num_attention_heads", "heads"), ("index_n_heads", "index heads")):
            if name in self.sizes:
                parts.append(f"{sizes[name]} of {getattr(whole, name)} {shown}")
        parts.append(f"{len(self.tokens)} of {whole.vocab_size} tokens")
        parts.append(f"index_topk {sizes['index_topk']} in place of {whole.index_topk}")
        return "; ".join(parts)


def is_wide(spec: ModelSpec, layers: Collection[int]) -> bool:
    """Whether exact arithmetic on a layer, or on the embedding, takes :data:`WIDE_BYTES`."""
    sizes: dict[str, int] = {}
    for name, parameter in canonical_parameters(spec, sorted(layers)).items():
        part = ".".join(name.split(".")[:3])  # model.layers.3, or a parameter outside of layers
        sizes[part] = sizes.get(part, 0) + 8 * math.prod(parameter.shape)
    return max(sizes.values()) >= WIDE_BYTES


def sample_of(
    spec: ModelSpec, config: CompileConfig, experts: int = EXPERTS, ids: Sequence[int] = ()
) -> Sample:
    """Choose what is kept of a model.

    Args:
        spec: of the model.
        config: of the compilation.
        experts: how many of a layer.
        ids: of tokens that will be run.

    Raises:
        UserError: no such number of experts can be kept.
    """
    if not 2 <= experts <= spec.n_routed_experts:
        raise UserError(f"--experts: give a number from 2 to {spec.n_routed_experts}")
    spaced = tuple(number * spec.n_routed_experts // experts for number in range(experts))
    tokens = tuple(sorted({*ids, *range(min(_TOKENS, spec.vocab_size))}))
    sizes = {
        **_routing(spec, experts),
        "n_routed_experts": experts,
        "vocab_size": len(tokens),
        "index_topk": min(_SELECTED, spec.index_topk),
        **_heads(spec, config.layout.tp),
    }
    # a field that is absent may have another meaning than the value that is taken for it
    sizes = {name: size for name, size in sizes.items() if getattr(spec, name, None) != size}
    layers = [call.index for call in program_plans(spec, config)[MODEL].layers]
    among = layers[0], layers[-1]
    return Sample(spec, spaced, tokens, sizes, _one_of_each_kind(spec, config, among), among)


def _routing(spec: ModelSpec, experts: int) -> dict[str, int]:
    """Groups, and what a token takes, so that there is a choice of groups and one within them."""
    most = min(spec.n_group, experts // 2)  # two experts make a group's score
    groups = next(count for count in range(most, 0, -1) if experts % count == 0)
    kept = max(1, spec.topk_group * groups // spec.n_group)
    candidates = kept * (experts // groups)
    chosen = min(spec.num_experts_per_tok, max(1, candidates // 2))
    return {"n_group": groups, "topk_group": kept, "num_experts_per_tok": chosen}


def _heads(spec: ModelSpec, ranks: int) -> dict[str, int]:
    """Heads that are kept, where those are fewer; each rank has whole FP8 blocks of them."""
    widths = (spec.qk_nope_head_dim + spec.v_head_dim, spec.qk_head_dim, spec.v_head_dim)
    whole = math.lcm(*map(_heads_of_whole_blocks, widths)) * ranks
    heads = -(-_HEADS // whole) * whole
    whole = _heads_of_whole_blocks(spec.index_head_dim)
    index_heads = -(-_INDEX_HEADS // whole) * whole
    kept: dict[str, int] = {}
    if heads < spec.num_attention_heads:
        kept |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    if index_heads < spec.index_n_heads:
        kept["index_n_heads"] = index_heads
    return kept


def _heads_of_whole_blocks(width: int) -> int:
    return BLOCK // math.gcd(BLOCK, width)


def _one_of_each_kind(
    spec: ModelSpec, config: CompileConfig, among: tuple[int, int]
) -> tuple[int, int]:
    """The fewest layers in a row that have every kind and can be compiled by themselves."""
    first, last = among
    wanted = set(spec.layer_kinds[first : last + 1])
    for count in range(len(wanted), last - first + 1):
        for start in range(first, last - count + 2):
            layers = start, start + count - 1
            if wanted <= set(spec.layer_kinds[start : start + count]):
                try:
                    program_plans(spec, replace(config, layers=layers))
                except UserError:  # it attends to what a layer before it selects
                    continue
                return layers
    return among
