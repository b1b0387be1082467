"""Faults of passes that cut a model over ranks, and of those that touch collectives."""

from tests.planted_bugs.second.fault import Fault

TP2 = (("tp", 2),)
DP2_EP2 = (("dp", 2), ("ep", 2))
ALL4 = (("tp", 2), ("dp", 2), ("ep", 4))

_WHOLE_EXPERTS = """\
            if whole:
                cuts = [Cut(m["gate_up"], 0, axis=axis), Cut(m["down"], 0, axis=axis)]
            else:
                cuts = [Cut(m["gate_up"], 1, stacked=2, axis=axis), Cut(m["down"], 2, axis=axis)]
            count = m["gate_up"].meta["val"].shape[0]
            part = compute_part(edit, program, cuts, m)
            if part is None:
                continue
            if layout.dp > 1:
                part = _with_lanes(edit, part, layout.dp)
            if whole:
                part = self._placed(edit, program, part, count)
            if layout.dp > 1:
                args = (part, DP, layout.dp)
                part = edit.call(dsa.reduce_scatter.default, *args, before=m.root)
            all_reduce(edit, program, m.root, part)

    def _placed(self, edit: Editor, program: Program, part: fx.Node, count: int) -> fx.Node:
        \"\"\"Call of the experts with the numbers that they have on this rank.\"\"\"
        layout = program.config.layout
        own = count // layout.ep
        values = tuple(
            expert - rank * own if expert // own == rank else -1
"""
_DEALT_EXPERTS = (
    _WHOLE_EXPERTS.replace(
        """\
            if whole:
                cuts = [Cut(m["gate_up"], 0, axis=axis), Cut(m["down"], 0, axis=axis)]
            else:
""",
        """\
            count = m["gate_up"].meta["val"].shape[0]
            if whole:
                own = count // layout.ep
                cuts = [Cut(m[name], 0, stacked=own, axis=axis) for name in ("gate_up", "down")]
            else:
""",
    )
    .replace(
        """\
            count = m["gate_up"].meta["val"].shape[0]
            part = compute_part""",
        """\
            part = compute_part""",
    )
    .replace("        own = count // layout.ep\n        values", "        values")
    .replace(
        "expert - rank * own if expert // own == rank else -1",
        "expert // layout.ep if expert % layout.ep == rank else -1",
    )
)

FAULTS = (
    Fault(
        id="experts-dealt-in-turn",
        about="numbers of experts are dealt to ranks in turn, their matrices in runs",
        file="passes/shard_experts.py",
        old="expert - rank * own if expert // own == rank else -1",
        new="expert // layout.ep if expert % layout.ep == rank else -1",
        kind="pass",
        culprit="shard_experts",
        options=(("tp", 2), ("ep", 2), ("shard_embedding", True)),
    ),
    Fault(
        id="places-by-expert-first",
        about="the numbers of all ranks lie expert by expert, and are cut rank by rank",
        file="passes/shard_experts.py",
        old=("            for rank in range(layout.ep)\n            for expert in range(count)\n"),
        new=("            for expert in range(count)\n            for rank in range(layout.ep)\n"),
        kind="pass",
        culprit="shard_experts",
        recipe="bf16",
        model="trained",
        options=DP2_EP2,
    ),
    Fault(
        id="absent-experts-are-the-first",
        about="an expert that another rank has gets the number of the first one here",
        file="passes/shard_experts.py",
        old="expert - rank * own if expert // own == rank else -1",
        new="expert - rank * own if expert // own == rank else 0",
        kind="pass",
        culprit="shard_experts",
        options=ALL4,
    ),
    Fault(
        id="experts-counted-in-a-lane",
        about="experts are counted as if a lane's ranks shared them, and not those of all lanes",
        file="passes/shard_experts.py",
        old="own = count // layout.ep",
        new="own = count // layout.tp",
        kind="pass",
        culprit="shard_experts",
        recipe="fp8",
        model="trained",
        options=DP2_EP2,
    ),
    Fault(
        id="gathers-found-by-type",
        about="the rows of all lanes are found by their type, which scales and weights share",
        file="passes/join_all_gathers.py",
        old=(
            "            for old, new in zip(gathers, edit.unpack(every, *names, before=first),"
            " strict=True):\n"
            "                edit.swap(old, new)\n"
        ),
        new=(
            "            made = edit.unpack(every, *names, before=first)\n"
            '            kinds = [(o.meta["val"].dtype, o.meta["val"].shape[1]) for o in gathers]\n'
            "            of_kind = dict(zip(kinds, made, strict=True))\n"
            "            for old, kind in zip(gathers, kinds, strict=True):\n"
            "                edit.swap(old, of_kind[kind])\n"
        ),
        kind="pass",
        culprit="join_all_gathers",
        recipe="fp8",
        model="wide",
        options=DP2_EP2,
    ),
    Fault(
        id="stream-without-the-sum",
        about="behind the norm that sums over ranks the stream goes on without what was summed",
        file="passes/fuse_all_reduce_norm.py",
        old="                edit.take(new, index, part, names[index])\n",
        new=(
            "                if index == 3:\n"
            '                    edit.swap(part, m["residual"])\n'
            "                else:\n"
            "                    edit.take(new, index, part, names[index])\n"
        ),
        kind="pass",
        culprit="fuse_all_reduce_norm",
        recipe="fp8",
        model="broad",
        options=TP2,
    ),
    Fault(
        id="tokens-gathered-before-their-norm",
        about="the experts get the tokens of all lanes from in front of the norm",
        file="passes/shard_experts.py",
        old="        for own in part.args[:3]\n        if isinstance(own, fx.Node)\n",
        new=(
            "        for own in (\n"
            "            x.args[0] if x.target is dsa.rms_norm.default else x  # type: ignore\n"
            "            for x in part.args[:3]\n"
            "        )\n"
            "        if isinstance(own, fx.Node)\n"
        ),
        kind="pass",
        culprit="shard_experts",
        options=(("dp", 2),),
    ),
    Fault(
        id="head-cut-in-two-pieces",
        about="a rank has a part of each half of the vocabulary, and parts are put side by side",
        file="passes/shard_head.py",
        old='[Cut(m["weight"], 0)]',
        new='[Cut(m["weight"], 0, stacked=2)]',
        kind="pass",
        culprit="shard_head",
        options=TP2,
    ),
    Fault(
        id="shared-expert-summed-twice",
        about="the shared expert's sum over ranks is added to the routed parts, and summed again",
        file="passes/join_all_reduces.py",
        old='part = edit.call(aten.add.Tensor, m["a"], m["b"], before=m.root, name=m.root.name)',
        new=(
            'part = edit.call(aten.add.Tensor, m["a"], m.root.args[1], before=m.root,'
            " name=m.root.name)"
        ),
        kind="pass",
        culprit="join_all_reduces",
        recipe="bf16",
        options=TP2,
    ),
    Fault(
        id="control-experts-dealt-in-turn",
        about="experts are dealt to ranks in turn, numbers and matrices alike",
        file="passes/shard_experts.py",
        old=_WHOLE_EXPERTS,
        new=_DEALT_EXPERTS,
        kind="pass",
        culprit="",
        control=True,
        options=DP2_EP2,
    ),
    Fault(
        id="control-one-gather-of-a-type",
        about="of gathers of one type the first goes into the joint message, the others stay apart",
        file="passes/join_all_gathers.py",
        old="            found[source] = None\n",
        new=(
            '            value = source.meta["val"]\n'
            '            others = [node.meta["val"] for node in found if node is not source]\n'
            "            alike = [v.dtype is value.dtype and v.shape[1] == value.shape[1]"
            " for v in others]\n"
            "            if not any(alike):\n"
            "                found[source] = None\n"
        ),
        kind="pass",
        culprit="",
        recipe="fp8",
        model="wide",
        control=True,
        options=DP2_EP2,
    ),
    Fault(
        id="control-experts-in-finer-pieces",
        about="a rank has a part of each half of an expert's inner dimension, not one run of it",
        file="passes/shard_experts.py",
        old='Cut(m["gate_up"], 1, stacked=2, axis=axis), Cut(m["down"], 2, axis=axis)',
        new='Cut(m["gate_up"], 1, stacked=4, axis=axis), Cut(m["down"], 2, stacked=2, axis=axis)',
        kind="pass",
        culprit="",
        control=True,
        options=(("dp", 2),),
    ),
)
