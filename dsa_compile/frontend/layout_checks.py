"""Whether a layout divides a model: every size that ranks share, and the FP8 blocks in it."""

from collections.abc import Iterator

from dsa_compile.errors import UserError
from dsa_compile.facts.formats import RECIPES
from dsa_compile.facts.layout import Layout
from dsa_compile.facts.model_spec import LayerKind, ModelSpec


def check_layout(spec: ModelSpec, layout: Layout, recipe: str) -> None:
    """Refuse a layout that does not divide a model.

    Raises:
        UserError: names the first size that does not divide, or that ends inside an FP8 block; or
            attention that no pass cuts.
    """
    if layout.world == 1:
        return
    if layout.tp > 1 and spec.output_gate:
        raise UserError(
            f"tp={layout.tp}: attention whose result is gated, as A.X-K2's, is not cut over ranks "
            "so far; give --dp, which shares its experts out, or leave out --tp"
        )
    if spec.scaled_queries:
        raise UserError(
            f"several ranks are not supported for model_type={spec.model_type!r}: no pass gives "
            "them their heads' learned scales of queries; leave out --tp, --dp and --ep"
        )
    for name, size, ranks, quantised in _shared(spec, layout):
        unit = max(RECIPES[recipe].weights.block, default=1) if quantised else 1
        if ranks > 1 and size % (ranks * unit):
            flag = _flag(name, layout)
            blocks = f" in whole blocks of {unit}, as recipe {recipe} keeps" if unit > 1 else ""
            raise UserError(
                f"{flag}={ranks}: {name}={size} of the model does not divide by {ranks}{blocks}; "
                f"give {_ways(flag)} that divides it{_others(name, layout, blocks)}"
            )
    if layout.dp > 1 and "experts" not in {kind.mlp for kind in _kinds(spec)}:
        raise UserError(
            f"dp={layout.dp}: lanes share routed experts, and the layers that are kept have none; "
            "leave out --dp, or keep a layer with experts"
        )


def _flag(name: str, layout: Layout) -> str:
    if name == "n_routed_experts":
        return "ep"
    return "tp*dp" if name == "moe_intermediate_size" and layout.dp > 1 else "tp"


def _ways(flag: str) -> str:
    return " and ".join(f"a --{name}" for name in flag.split("*"))


def _others(name: str, layout: Layout, blocks: str) -> str:
    """Other options that mend a size that does not divide."""
    ways = [f"--ep {layout.world} for whole experts"] if name == "moe_intermediate_size" else []
    ways += ["another --recipe"] if blocks else []
    return "".join(f", or {way}" for way in ways)


def _kinds(spec: ModelSpec) -> Iterator[LayerKind]:
    return (kind for kind in spec.kinds if kind.name in spec.layer_kinds)


def _shared(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, int, int, bool]]:
    """Sizes that ranks share: name, size, ranks, whether FP8 blocks lie along it."""
    tp = layout.tp
    yield "num_attention_heads", spec.num_attention_heads, tp, False
    queries, values = (spec.num_attention_heads * d for d in (spec.qk_head_dim, spec.v_head_dim))
    yield "num_attention_heads * qk_head_dim", queries, tp, True
    yield "num_attention_heads * v_head_dim", values, tp, True
    mlps = {kind.mlp for kind in _kinds(spec)}
    if "dense" in mlps:
        yield "intermediate_size", spec.intermediate_size, tp, True
    if "experts" in mlps:
        shared = spec.n_shared_experts * spec.moe_intermediate_size
        yield "n_shared_experts * moe_intermediate_size", shared, tp, True
        if layout.ep > 1:
            yield "n_routed_experts", spec.n_routed_experts, layout.ep, False
        else:
            yield "moe_intermediate_size", spec.moe_intermediate_size, layout.world, True
    yield "vocab_size", spec.vocab_size, tp, False
    if layout.shard_embedding:
        yield "hidden_size", spec.hidden_size, tp, False
