"""Faults of the passes that restructure, merge and split."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="latent-row-swapped",
        about="a row has the rotated key first",
        file="passes/insert_paged_caches.py",
        old=(
            'edit.call(dsa.write_latent_cache.default, m["ckv"], m["k_pe"], latent, '
            "slots, before=root)"
        ),
        new=(
            'edit.call(dsa.write_latent_cache.default, m["k_pe"], m["ckv"], latent, '
            "slots, before=root)"
        ),
        kind="pass",
        culprit="insert_paged_caches",
    ),
    Fault(
        id="merge-gate-and-up-swapped",
        about="the merged weight has the up rows first",
        file="passes/merge_projections.py",
        old="expr = Concat(0, tuple(entry.expr for entry in entries))",
        new=(
            "expr = Concat(0, tuple(entry.expr for entry in (entries if len(parts) > "
            "2 else entries[::-1])))"
        ),
        kind="pass",
        culprit="merge_projections",
        recipe="fp8",
    ),
    Fault(
        id="merge-low-ranks-reversed",
        about="the merged low ranks' rows are stacked in reverse",
        file="passes/merge_projections.py",
        old="expr = Concat(0, tuple(entry.expr for entry in entries))",
        new=(
            "expr = Concat(0, tuple(entry.expr for entry in (entries[::-1] if "
            "len(parts) > 2 else entries)))"
        ),
        kind="pass",
        culprit="merge_projections",
    ),
    Fault(
        id="shared-expert-first",
        about="the shared expert is stacked before the routed ones",
        file="passes/merge_shared_expert.py",
        old="expr = Concat(0, (first.expr, Reshape((1, *matrix), last.expr)))",
        new="expr = Concat(0, (Reshape((1, *matrix), last.expr), first.expr))",
        kind="pass",
        culprit="merge_shared_expert",
        recipe="bf16",
        site=1,
    ),
    Fault(
        id="short-writes-no-index-keys",
        about="the short variant leaves out the indexer's keys",
        file="passes/split_short_long.py",
        old="            edit.replace(node, rows)",
        new=(
            "            edit.replace(node, rows)\n"
            "        for node in calls(edit.graph, dsa.write_index_cache.default):\n"
            "            edit.erase(node)"
        ),
        kind="pass",
        culprit="split_short_long",
        recipe="bf16",
    ),
    Fault(
        id="dense-rows-swapped-sizes",
        about="the short variant's rows take the page size for the width",
        file="passes/split_short_long.py",
        old="sizes = (program.config.block_size, program.spec.index_topk)",
        new="sizes = (program.spec.index_topk, program.config.block_size)",
        kind="pass",
        culprit="split_short_long",
        recipe="fp8",
        model="trained-fp8",
    ),
    Fault(
        id="experts-take-quantised-twice",
        about="the experts take indices for weights and weights for indices",
        file="passes/merge_shared_expert.py",
        old='args = (m["x"], *chosen, *matrices)',
        new='args = (m["x"], *chosen[::-1], *matrices)',
        kind="pass",
        culprit="merge_shared_expert",
    ),
    Fault(
        id="select-last-rows",
        about="a step has the logits of its first row alone",
        file="passes/select_logit_rows.py",
        old=("picked = edit.call(aten.index_select.default, value, 0, rows, before=rows.next)"),
        new="picked = edit.call(aten.slice.Tensor, value, 0, 0, 1, before=rows.next)",
        kind="pass",
        culprit="select_logit_rows",
        site=1,
    ),
    Fault(
        id="absorb-scale-of-moe",
        about="MoE layers' softmax scale is a tenth off",
        file="passes/absorb_mla.py",
        old='m["indices"], m["scale"])',
        new='m["indices"], m["scale"] * (1.1 if kind == "moe" else 1.0))',
        kind="pass",
        culprit="absorb_mla",
        recipe="fp8-kv-tensor",
        site=2,
        layers=(2, 3),
    ),
    Fault(
        id="absorb-values-from-row-0",
        about="the value matrix is cut from a head's first rows",
        file="passes/absorb_mla.py",
        old="W_UV: (dn, dv)}",
        new="W_UV: (0, dv)}",
        kind="pass",
        culprit="absorb_mla",
        recipe="bf16",
    ),
    Fault(
        id="absorb-head-minor",
        about="the rows of kv_b are taken to be of all heads in turn",
        file="passes/absorb_mla.py",
        old="by_head = Reshape((heads, dn + dv, rank), old.expr)",
        new=(
            "from dsa_compile.weights.plan import Transpose\n"
            "\n"
            "        by_head = Transpose(0, 1, Reshape((dn + dv, heads, rank), "
            "old.expr))"
        ),
        kind="pass",
        culprit="absorb_mla",
        recipe="fp8",
    ),
    Fault(
        id="absorb-scale-without-mscale",
        about="the softmax scale lacks the square of YaRN's mscale",
        file="passes/absorb_mla.py",
        old='args = (query, m["q_pe"], m["ckv"], k_pe, m["indices"], m["scale"])',
        new=(
            'rope = m["q_pe"].meta["val"].shape[-1]\n'
            '        args = (query, m["q_pe"], m["ckv"], k_pe, m["indices"], '
            "float(dn + rope) ** -0.5)"
        ),
        kind="pass",
        culprit="absorb_mla",
        echo="onnxruntime/mobius#548",
    ),
    Fault(
        id="index-read-before-write",
        about="keys are scored before this step's are written",
        file="passes/insert_paged_caches.py",
        old=(
            '        edit.call(dsa.write_index_cache.default, m["ik"], cache, slots, '
            "before=at)\n"
            "        rows = edit.call(\n"
            "            dsa.paged_index_topk.default,\n"
            '            *(m["iq"], m["iw"], cache, tables, starts, lengths, '
            'm["topk"], m["index_scale"]),\n'
            "            before=at,\n"
            "        )\n"
        ),
        new=(
            "        rows = edit.call(\n"
            "            dsa.paged_index_topk.default,\n"
            '            *(m["iq"], m["iw"], cache, tables, starts, lengths, '
            'm["topk"], m["index_scale"]),\n'
            "            before=at,\n"
            "        )\n"
            '        edit.call(dsa.write_index_cache.default, m["ik"], cache, slots, '
            "before=at)\n"
        ),
        kind="pass",
        culprit="insert_paged_caches",
        recipe="bf16",
    ),
    Fault(
        id="latent-read-before-write",
        about="attention reads the cache before this step's rows are in it",
        file="passes/insert_paged_caches.py",
        old=(
            '        edit.call(dsa.write_latent_cache.default, m["ckv"], m["k_pe"], '
            "latent, slots, before=root)\n"
            '        args = (m["q"], m["q_pe"], latent, rows, m["scale"])\n'
            "        edit.replace(root, "
            "edit.call(dsa.paged_latent_attention.default, *args, before=root))"
        ),
        new=(
            '        args = (m["q"], m["q_pe"], latent, rows, m["scale"])\n'
            "        new = edit.call(dsa.paged_latent_attention.default, *args, "
            "before=root)\n"
            '        edit.call(dsa.write_latent_cache.default, m["ckv"], m["k_pe"], '
            "latent, slots, before=root)\n"
            "        edit.replace(root, new)"
        ),
        kind="pass",
        culprit="insert_paged_caches",
    ),
    Fault(
        id="merge-split-by-first-rows",
        about="a split's sizes are those of equal parts",
        file="passes/merge_projections.py",
        old=("pieces = edit.call(aten.split_with_sizes.default, whole, rows, -1, **where)"),
        new=(
            "pieces = edit.call(aten.split_with_sizes.default, whole, [sum(rows) // "
            "len(rows)] * len(rows), -1, **where)"
        ),
        kind="pass",
        culprit="merge_projections",
    ),
    Fault(
        id="merge-shared-gate-and-up-swapped",
        about="the shared expert's merged weight has the up rows first",
        file="passes/merge_projections.py",
        old="expr = Concat(0, tuple(entry.expr for entry in entries))",
        new=(
            "expr = Concat(0, tuple(entry.expr for entry in (entries[::-1] if "
            '"shared" in key else entries)))'
        ),
        kind="pass",
        culprit="merge_projections",
        recipe="bf16",
        model="trained",
        site=4,
    ),
    Fault(
        id="short-moe-writes-no-index-keys",
        about="the short variant of MoE layers leaves out the indexer's keys",
        file="passes/split_short_long.py",
        old="            edit.replace(node, rows)",
        new=(
            "            edit.replace(node, rows)\n"
            '            if edit.region.kind == "moe":\n'
            "                for write in calls(edit.graph, dsa.write_index_cache.default):\n"
            "                    edit.erase(write)"
        ),
        kind="pass",
        culprit="split_short_long",
        recipe="bf16",
        layers=(2, 3),
    ),
)
