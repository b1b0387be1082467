"""Attention of prompts goes from absorbed MLA back to a key and a value a head.

Before::                                        After::

    ql, qp = dsa.absorb_rope_query(             qn, pe = split(q, [dn, dr], -1)
            q, w_uk, cos, sin)                  qp = dsa.rope_interleaved(pe, cos, sin)
    a = dsa.paged_latent_attention(             o = dsa.paged_prompt_attention(
            ql, qp, cache, slots, s)                    qn, qp, cache, slot_mapping, positions,
    o = dsa.expand_output(a, w_uv)                      w_uk, w_uv, s, slots)

What a token of a prompt attends to are tokens of the same step: all before it in the prompt
variant, which needs no ``slots`` then, and those that it has selected in the long prompt variant.
Absorbed, a score and its value cost 576 + 512 products a head in the published model, and 192 + 128
with keys and values of the head; what these cost to make is what absorbing costs. Attention to rows
in FP8 is rewritten likewise; where it goes on to quantise, ``dsa.quantize_blocks`` does so behind
it.

Declines: results in the latent space that something else reads.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import fx
from torch._ops import OpOverload

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Match, Node, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.plan import LONG_PROMPT, PROMPTS
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.shared import each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa

_PROMPT = {
    dsa.paged_latent_attention.default: dsa.paged_prompt_attention.default,
    dsa.paged_latent_attention_fp8.default: dsa.paged_prompt_attention_fp8.default,
    dsa.paged_latent_attention_fp8_tensor.default: dsa.paged_prompt_attention_fp8_tensor.default,
}
# Attention, product and quantisation in one op: by the first of these.
_FUSED = {
    dsa.paged_latent_attention_fp8.default: dsa.paged_latent_attention_fp8_expand.default,
    dsa.paged_latent_attention_fp8_tensor.default: (
        dsa.paged_latent_attention_fp8_tensor_expand.default
    ),
}


class ExpandPromptAttention(RegionPass):
    """Absorbed attention of the variants of prompts becomes attention by heads."""

    numerics = Numerics.TOLERANCE  # products in another order
    requires = ("split_prompts",)

    def expects(self, program: Program, region: Region) -> int | None:
        """The attention of every layer of those variants."""
        return each_layer(program, region) if region.variant in PROMPTS else 0

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        if edit.region.variant not in PROMPTS:
            return
        for attention, prompt in _PROMPT.items():
            for pattern in _patterns(attention):
                for m in edit.matches(pattern):
                    _expand(edit, m, prompt)


def _patterns(attention: OpOverload) -> Iterator[Call]:
    """Queries that are rotated with the absorption or apart, and what attention goes on to."""
    both = Call(dsa.absorb_rope_query.default, Node("q"), Node("w_uk"), Node("cos"), Node("sin"))
    apart = Call(dsa.absorb_query.default, Node("q_nope"), Node("w_uk"))
    queries = ((getitem(both, 0), getitem(both, 1)), (apart, Node("q_pe")))
    quantizes = Const("ue8m0", bool)
    for given, last in product(queries, (dsa.expand_output, dsa.expand_output_quantize)):
        latent = Call(attention, *given, *_operands(attention))
        rest = (quantizes,) if last is dsa.expand_output_quantize else ()
        yield Call(last.default, latent, Node("w_uv"), *rest)
    if (fused := _FUSED.get(attention)) is not None:
        for given in queries:
            yield Call(fused, *given, *_operands(attention), Node("w_uv"), quantizes)


def _operands(attention: OpOverload) -> Iterator[Node | Const]:
    """Operands of attention behind its queries, by the names of its schema."""
    for argument in attention._schema.arguments[2:]:
        is_number = isinstance(argument.type, torch.FloatType)
        yield Const(argument.name, float) if is_number else Node(argument.name)


def _expand(edit: Editor, m: Match, prompt: OpOverload) -> None:
    root = m.root
    q_nope, q_pe = _queries(edit, m)
    slots = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
    positions = edit.input(Role.BATCH, "positions", ("T",), torch.int64)
    args = [q_nope, q_pe, m["cache"], slots, positions, m["w_uk"], m["w_uv"], m["scale"]]
    args += [m[a.name] for a in prompt._schema.arguments[len(args) : -1]]
    if edit.region.variant == LONG_PROMPT:
        args.append(m["slots"])
    out = edit.call(prompt, *args, before=root)
    if "ue8m0" in m.bound:
        heads, values, _ = m["w_uv"].meta["val"].shape
        flat = edit.call(aten.reshape.default, out, [-1, heads * values], before=root)
        out = edit.call(dsa.quantize_blocks.default, flat, m["ue8m0"], before=root)
    edit.replace(root, out)


def _queries(edit: Editor, m: Match) -> tuple[fx.Node, fx.Node]:
    if "q_nope" in m.bound:
        return m["q_nope"], m["q_pe"]
    widths = [m["w_uk"].meta["val"].shape[1], m["cos"].meta["val"].shape[-1]]
    split = edit.call(aten.split_with_sizes.default, m["q"], widths, -1, before=m.root)
    q_nope, pe = edit.unpack(split, "q_nope", "q_rope", before=m.root)
    q_pe = edit.call(dsa.rope_interleaved.default, pe, m["cos"], m["sin"], before=m.root)
    return q_nope, q_pe
