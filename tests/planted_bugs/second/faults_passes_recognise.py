"""Faults of the passes that recognise."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="recognize-half-key-interleaved",
        about="the indexer's key alone is rotated in neighbours",
        file="passes/recognize_rope_half.py",
        old=("edit.replace(m.root, edit.call(dsa.rope_half.default, *args, before=m.root))"),
        new=(
            'op = dsa.rope_interleaved if m["x"].meta["val"].shape[2] == 1 else '
            "dsa.rope_half\n"
            "            edit.replace(m.root, edit.call(op.default, *args, "
            "before=m.root))"
        ),
        kind="pass",
        culprit="recognize_rope_half",
        echo="vllm-project/vllm-ascend#7341",
    ),
    Fault(
        id="recognize-half-all-interleaved",
        about="the indexer's queries and keys are rotated in neighbours",
        file="passes/recognize_rope_half.py",
        old="edit.call(dsa.rope_half.default, *args, before=m.root)",
        new="edit.call(dsa.rope_interleaved.default, *args, before=m.root)",
        kind="pass",
        culprit="recognize_rope_half",
        recipe="bf16",
        model="trained",
        echo="sgl-project/sglang#13495",
    ),
    Fault(
        id="rope-tables-swapped",
        about="cosine and sine change places",
        file="passes/recognize_rope_tables.py",
        old='edit.take(pair, index, root, ("cos", "sin")[index])',
        new='edit.take(pair, 1 - index, root, ("cos", "sin")[index])',
        kind="pass",
        culprit="recognize_rope_tables",
        site=1,
    ),
    Fault(
        id="router-scaled-twice",
        about="the routed scaling factor is applied twice",
        file="passes/recognize_router.py",
        old='m["top_k"], normalize, m["scale"])',
        new='m["top_k"], normalize, m["scale"] * m["scale"])',
        kind="pass",
        culprit="recognize_router",
        site=1,
        echo="vllm-project/vllm#24119",
    ),
    Fault(
        id="buffer-filled-backwards",
        about="what filled a buffer is joined in reverse",
        file="passes/functionalize.py",
        old="values = [copy.args[1] for copy in copies]",
        new="values = [copy.args[1] for copy in copies[::-1]]",
        kind="pass",
        culprit="functionalize",
    ),
    Fault(
        id="sparse-values-are-keys",
        about="attention's keys and values change places",
        file="passes/recognize_sparse_attention.py",
        old='for name in "qkv"',
        new='for name in "qvk"',
        kind="pass",
        culprit="recognize_sparse_attention",
        recipe="bf16",
    ),
    Fault(
        id="sparse-scale-of-the-indexer",
        about="attention takes the indexer's scale",
        file="passes/recognize_sparse_attention.py",
        old="            self._attend(edit, attention, selected)\n",
        new=(
            '            attention.bound["scale"] = scoring["scale"]\n'
            "            self._attend(edit, attention, selected)\n"
        ),
        kind="pass",
        culprit="recognize_sparse_attention",
        recipe="fp8-kv-tensor",
        echo="NVIDIA/Megatron-LM#1429",
    ),
    Fault(
        id="control-index-scale-doubled",
        about="a positive factor on the index scores chooses the same keys",
        file="passes/recognize_sparse_attention.py",
        old='scoring["weights"], topk, scoring["scale"])',
        new='scoring["weights"], topk, 2.0 * scoring["scale"])',
        kind="pass",
        culprit="",
        control=True,
    ),
    Fault(
        id="rope-key-tables-swapped",
        about="the shared key is rotated by swapped tables",
        file="passes/recognize_rope_interleaved.py",
        old='dsa.rope_interleaved.default, turned, m["cos"], m["sin"], before=m.root',
        new=(
            "dsa.rope_interleaved.default,\n"
            "                turned,\n"
            '                *((m["sin"], m["cos"]) if m["x"].meta["val"].shape[1] '
            '== 1 else (m["cos"], m["sin"])),\n'
            "                before=m.root,"
        ),
        kind="pass",
        culprit="recognize_rope_interleaved",
        recipe="bf16",
    ),
    Fault(
        id="router-groups-swapped",
        about="the number of groups and of those kept change places",
        file="passes/recognize_router.py",
        old='*groups, m["top_k"], normalize',
        new='*groups[::-1], m["top_k"], normalize',
        kind="pass",
        culprit="recognize_router",
        recipe="bf16",
        site=1,
    ),
    Fault(
        id="router-not-normalised",
        about="the chosen weights are not divided by their sum",
        file="passes/recognize_router.py",
        old='m["top_k"], normalize, m["scale"])',
        new='m["top_k"], False, m["scale"])',
        kind="pass",
        culprit="recognize_router",
        recipe="fp8-kv-tensor",
        site=1,
        echo="NVIDIA/TensorRT-Model-Connect#669",
    ),
    Fault(
        id="strided-slices-stripped",
        about="slices of every other value are taken for whole ones",
        file="passes/strip_noise.py",
        old='if whole and argument(node, "step") == 1:',
        new="if whole:",
        kind="pass",
        culprit="strip_noise",
    ),
)
