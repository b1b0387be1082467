"""Faults of the ops' implementations."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="router-groups-by-unbiased-scores",
        about="groups are chosen by scores without the correction bias",
        file="dsa_compile/ops/moe.py",
        old="group_scores = grouped.topk(2, sorted=False).values.sum(-1)",
        new=(
            "group_scores = scores.unflatten(1, (n_group, -1)).topk(2, sorted=False).values.sum(-1)"
        ),
        kind="kernel",
        culprit="router",
    ),
    Fault(
        id="router-scaled-before-normalising",
        about="the routed scale is applied before weights are normalised, which undoes it",
        file="dsa_compile/ops/moe.py",
        old=(
            "    if normalize:\n"
            "        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))\n"
            "    weights.mul_(scale)\n"
        ),
        new=(
            "    weights.mul_(scale)\n"
            "    if normalize:\n"
            "        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))\n"
        ),
        kind="kernel",
        culprit="router",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="experts-rows-of-the-slot",
        about="sorted rows are gathered by choice and not by token; right for one token",
        file="dsa_compile/ops/moe.py",
        old="x.index_select(0, order // top_k)",
        new="x.index_select(0, order % tokens)",
        kind="kernel",
        culprit="experts",
    ),
    Fault(
        id="decode-sees-one-past-its-end",
        about="a single row scores the cache row behind its context",
        file="dsa_compile/ops/indexer.py",
        old='torch.arange(scores.shape[1], dtype=torch.int32) >= ends, float("-inf"))',
        new='torch.arange(scores.shape[1], dtype=torch.int32) > ends, float("-inf"))',
        kind="kernel",
        culprit="paged_index_topk",
        recipe="bf16",
    ),
    Fault(
        id="row-scales-behind-the-key",
        about="a row is written as values, key, scales and read as values, scales, key",
        file="dsa_compile/ops/fused_cache.py",
        old="for part in (q, scale, k_pe)], -1)",
        new="for part in (q, k_pe, scale)], -1)",
        kind="kernel",
        culprit="norm_rope_write_latent_cache_fp8",
        recipe="fp8",
    ),
    Fault(
        id="linear-fp8-first-activation-scale",
        about="all blocks of a row are multiplied by its first block's scale",
        file="dsa_compile/ops/linear_fp8.py",
        old="out += part * (x_scale[:, block, None] * by_row[None, :, block])",
        new="out += part * (x_scale[:, :1] * by_row[None, :, block])",
        kind="kernel",
        culprit="linear_fp8",
        recipe="fp8-kv-tensor",
        layers=(0, 1),
    ),
    Fault(
        id="control-absent-pages-not-masked",
        about="pages behind a context's end are listed as page 0, and never read",
        file="dsa_compile/ops/index_fp8.py",
        old="compact_tables.int().masked_fill_(block_tables < 0, -1),",
        new="compact_tables.int(),",
        kind="kernel",
        culprit="",
        recipe="fp8",
        control=True,
    ),
    Fault(
        id="control-written-rows-always-filtered",
        about="rows without a slot are looked for in every step",
        file="dsa_compile/ops/cache.py",
        old="    if len(kept) < len(slot_mapping):\n",
        new="    if len(slot_mapping):\n",
        kind="kernel",
        culprit="",
        control=True,
    ),
    Fault(
        id="short-forgets-a-part-of-a-page",
        about="the short variant lists whole pages of index_topk rows alone",
        file="dsa_compile/ops/cache.py",
        old="blocks = min(-(-width // block_size), block_tables.shape[1])",
        new="blocks = min(width // block_size, block_tables.shape[1])",
        kind="kernel",
        culprit="dense_slots",
        recipe="fp8",
        options=(("block_size", 32),),
    ),
    Fault(
        id="saturates-at-240",
        about="e4m3 values end at 240, as in another format of that name",
        file="dsa_compile/ops/quantize.py",
        old="return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)",
        new="return x.clamp(-240.0, 240.0).to(E4M3)",
        kind="kernel",
        culprit="quantize_blocks",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="query-rotated-part-first",
        about="a head's rotated values are taken from its front",
        file="dsa_compile/ops/head_products.py",
        old="nope, rope = q.split([w_uk.shape[1], cos.shape[-1]], -1)",
        new="rope, nope = q.split([cos.shape[-1], w_uk.shape[1]], -1)",
        kind="kernel",
        culprit="absorb_rope_query",
        recipe="bf16",
    ),
    Fault(
        id="control-best-in-any-order",
        about="the best keys come in no order",
        file="dsa_compile/ops/selection.py",
        old="return keys.topk(min(topk, width)).indices",
        new="return keys.topk(min(topk, width)).indices.flip(1)",
        kind="kernel",
        culprit="",
        control=True,
    ),
    Fault(
        id="gathered-rows-not-columns",
        about="ranks' columns are joined as rows and reshaped; right for one token",
        file="dsa_compile/ops/collectives.py",
        old="return torch.cat(list(parts), -1)",
        new="return torch.cat(list(parts), 0).view(*parts[0].shape[:-1], -1)",
        kind="kernel",
        culprit="all_gather",
        options=(("tp", 2),),
    ),
    Fault(
        id="control-sum-rounded-before-its-norm",
        about="a sum is rounded before it is normed, as where the two are apart",
        file="dsa_compile/ops/quantize.py",
        old="    normed = _norm(total, weight, eps, x.dtype).contiguous()\n",
        new="    normed = _norm(total.to(x.dtype).float(), weight, eps, x.dtype).contiguous()\n",
        kind="kernel",
        culprit="",
        recipe="fp8",
        model="trained-fp8",
        control=True,
    ),
    Fault(
        id="scales-of-another-expert",
        about="down scales are those of the first expert",
        file="dsa_compile/ops/experts_fp8.py",
        old="counts, down, down_scale, 1)",
        new="counts, down, down_scale[:1].expand_as(down_scale), 1)",
        kind="kernel",
        culprit="experts_fp8",
        recipe="fp8",
        model="trained-fp8",
    ),
    Fault(
        id="chosen-rows-by-the-dense-table",
        about="chosen rows are given in the compacted pages, not in those of the cache",
        file="dsa_compile/ops/index_fp8.py",
        old="rows: Tensor = used.take(block.long()).int() * block_size + offset",
        new="rows: Tensor = block.int() * block_size + offset",
        kind="kernel",
        culprit="paged_index_topk_fp8",
        recipe="fp8",
    ),
    Fault(
        id="tables-of-mixed-halves",
        about="the rotation of tables takes both halves from the first: cosine where sine belongs",
        file="dsa_compile/ops/rope.py",
        old="return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)",
        new="return torch.cat((cos, sin), -1).to(dtype), torch.cat((sin, cos), -1).to(dtype)",
        kind="kernel",
        culprit="rope_tables",
        recipe="fp8",
    ),
    Fault(
        id="scored-in-the-models-dtype",
        about="index scores are summed over heads in the model's dtype",
        file="dsa_compile/ops/indexer.py",
        old=(
            "        scores = torch.bmm(weights[start:stop].unsqueeze(1), "
            "logits.view(rows, heads, visible))\n"
        ),
        new=(
            "        scores = torch.bmm(\n"
            "            weights[start:stop].unsqueeze(1).bfloat16(),\n"
            "            logits.view(rows, heads, visible).bfloat16(),\n"
            "        ).float()\n"
        ),
        kind="kernel",
        culprit="index_topk",
        recipe="bf16",
        model="trained",
    ),
    Fault(
        id="gate-and-up-interleaved",
        about="gate and up are taken from columns in turn, and stand in halves",
        file="dsa_compile/ops/quantize.py",
        old="gate, up = gate_up.float().chunk(2, -1)",
        new="gate, up = gate_up.float().unflatten(-1, (-1, 2)).unbind(-1)",
        kind="kernel",
        culprit="swiglu_packed_quantize",
        recipe="fp8-kv-tensor",
        layers=(0, 1),
    ),
    Fault(
        id="decode-scores-two-selections",
        about="a single row scores so many keys as two selections have; right up to there",
        file="dsa_compile/ops/indexer.py",
        old="    blocks = -(-int(lengths.max()) // block_size)\n    present = tables[:, :blocks]",
        new=(
            "    lengths = np.minimum(lengths, 2 * topk)\n"
            "    blocks = -(-int(lengths.max()) // block_size)\n    present = tables[:, :blocks]"
        ),
        kind="kernel",
        culprit="paged_index_topk",
    ),
    Fault(
        id="values-from-the-rows-end",
        about="where every slot is valid, values are a row's last columns; other steps are right",
        file="dsa_compile/ops/attention.py",
        old="return torch.bmm(logits.softmax(-1), gathered[..., :latent]).to(query.dtype)",
        new="return torch.bmm(logits.softmax(-1), gathered[..., -latent:]).to(query.dtype)",
        kind="kernel",
        culprit="paged_latent_attention",
    ),
)
