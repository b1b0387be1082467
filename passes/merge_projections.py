"""Merge projections that read the same activations into one.

Before::                            After::

    qa  = dsa.linear(x, w_q_a)          y = dsa.linear(x, w_merged)
    kva = dsa.linear(x, w_kv_a)         qa, k, kva = split(y, [1536, 128, 576], -1)
    k   = dsa.linear(x, w_k)

The groups are a list and not a search: the order inside a group is chosen so that every part starts
on a 128-row block of the FP8 weights (1,536 + 128 + 576; the latent in second place would not), and
the indexer's query projection stays alone because short sequences do not need it.

Declines: a group whose members read different inputs, differ in dtype, or have other users.
"""

import operator
from typing import Any

import torch
from torch import fx

from dsa_compile.facts.model_spec import LayerKind
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import calls
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.shared import each_layer
from dsa_compile.weights.plan import Concat, WeightEntry

aten, dsa = torch.ops.aten, torch.ops.dsa

# What attention's first projections are called in the name of the merged weight.
_FIRST = {
    "q_a": "self_attn.q_a_proj.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.indexer.wk.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
}
# merged weight ← its parts, in row order
MLPS = {
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared_experts.gate_up_proj.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
}


def first_projections(layer: LayerKind, low_rank: bool) -> dict[str, tuple[str, ...]]:
    """The merged weight of attention's first projections, and its parts in row order; none of one.

    Args:
        layer: says which it has.
        low_rank: whether that of the queries is the first of two.
    """
    has = {"q_a": low_rank, "q": not low_rank, "k": layer.indexer}
    has["kv_a"] = layer.latents != "borrowed"
    names = [name for name in _FIRST if has[name]]
    if len(names) < 2:
        return {}
    return {f"self_attn.{'_'.join(names)}.weight": tuple(_FIRST[name] for name in names)}


class MergeProjections(RegionPass):
    """One GEMM and a split for each group of projections."""

    numerics = Numerics.TOLERANCE  # a wider GEMM may sum in another order
    requires = ("recognize_linear", "flatten_tokens")

    def expects(self, program: Program, region: Region) -> int | None:
        """Attention's first projections, and the gate and up of the one dense MLP."""
        layer = program.layer_kind(region)
        firsts = first_projections(layer, bool(program.spec.q_lora_rank)) if layer else {}
        return each_layer(program, region, 1 + len(firsts))

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Merge every group that is present."""
        layer = program.layer_kind(edit.region)
        if layer is None:
            return
        by_key = {
            node.args[1].meta["key"]: node  # type: ignore[union-attr]
            for node in calls(edit.graph, dsa.linear.default)
        }
        firsts = first_projections(layer, bool(program.spec.q_lora_rank))
        for merged, parts in (firsts | MLPS).items():
            present = [by_key[key] for key in parts if key in by_key]
            if len(present) < len(parts):
                continue
            reason = _differ(present)
            if reason:
                edit.decline(present[0], reason, len(present))
                continue
            self._merge(edit, program, merged, present)

    def _merge(self, edit: Editor, program: Program, key: str, parts: list[fx.Node]) -> None:
        kind = edit.region.kind
        edit.begin_site()
        entries = [
            program.weights.remove(kind, part.args[1].meta["key"])  # type: ignore[union-attr]
            for part in parts
        ]
        rows = [entry.shape[0] for entry in entries]
        shape = (sum(rows), *entries[0].shape[1:])
        expr = Concat(0, tuple(entry.expr for entry in entries))
        program.weights.define(kind, key, WeightEntry(entries[0].dtype, shape, expr))
        weight = edit.input(Role.WEIGHT, key, shape, entries[0].torch_dtype)
        first = min(parts)
        where: dict[str, Any] = {"before": first, "path": key.removesuffix(".weight")}
        whole = edit.call(dsa.linear.default, first.args[0], weight, **where)
        pieces = edit.call(aten.split_with_sizes.default, whole, rows, -1, **where)
        for index, part in enumerate(parts):
            where |= {"path": part.meta["path"], "name": part.meta["path"].rpartition(".")[2]}
            edit.swap(part, edit.call(operator.getitem, pieces, index, **where))
        edit.close_site()


def _differ(parts: list[fx.Node]) -> str | None:
    inputs = {part.args[0] for part in parts}
    if len(inputs) > 1:
        return f"the projections of the group read different inputs: {sorted(map(str, inputs))}"
    weights = [part.all_input_nodes[1] for part in parts]
    shared = next((weight for weight in weights if len(weight.users) > 1), None)
    if shared is None:
        return None
    return f"weight {shared.meta['key']} is used {len(shared.users)} times"
