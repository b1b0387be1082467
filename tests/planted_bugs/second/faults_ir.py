"""Faults of the editing helpers, of plans and of what writes graphs."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="sweep-drops-writes",
        about="dead code takes writes of caches along",
        file="dsa_compile/ir/edit.py",
        old="        self.graph.eliminate_dead_code()\n",
        new=(
            "        self.graph.eliminate_dead_code(lambda node: node.op in "
            '("placeholder", "output"))\n'
        ),
        kind="ir",
        culprit="sweep",
    ),
    Fault(
        id="writing-stops-early",
        about="a step without results leaves out the last layer that writes a cache",
        file="dsa_compile/ir/plan.py",
        old="return self.calls[: last + 1]",
        new="return self.calls[:last]",
        kind="ir",
        culprit="writing",
        recipe="bf16",
        layers=(3,),
        hidden_by="max_batched_tokens=2048",
    ),
    Fault(
        id="next-norm-of-last-but-one",
        about="the layer before the last takes the final norm too",
        file="dsa_compile/frontend/build.py",
        old='if index < last else "model.norm"',
        new='if index + 1 < last else "model.norm"',
        kind="ir",
        culprit="model_plan",
        recipe="bf16",
        layers=(2,),
    ),
    Fault(
        id="layers-share-caches",
        about="all layers write the rows of the first layer's caches",
        file="dsa_compile/frontend/build.py",
        old=("layers.append(Call(name, spec.layer_kinds[index], names, caches=name, layer=index))"),
        new=(
            "layers.append(Call(name, spec.layer_kinds[index], names, "
            'caches=f"layer_{first:03d}", layer=index))'
        ),
        kind="ir",
        culprit="model_plan",
        recipe="fp8",
    ),
    Fault(
        id="reroute-skips-the-rest",
        about="a rerouted value keeps its last user",
        file="dsa_compile/ir/edit.py",
        old=("old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)"),
        new=(
            "old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not "
            "new and len(user.users) > 1)"
        ),
        kind="ir",
        culprit="reroute",
    ),
    Fault(
        id="control-results-after",
        about="a new result comes before the one it is said to follow",
        file="dsa_compile/ir/edit.py",
        old="at = len(names) if after is None else names.index(after) + 1",
        new="at = len(names) if after is None else names.index(after)",
        kind="ir",
        culprit="",
        recipe="fp8",
        control=True,
    ),
    Fault(
        id="duplicates-by-nodes-alone",
        about="calls that differ in a constant count as duplicates",
        file="dsa_compile/ir/edit.py",
        old="key = (node.target, str(node.args), str(node.kwargs))",
        new="key = (node.target, str(node.all_input_nodes))",
        kind="ir",
        culprit="merge_duplicates",
        recipe="fp8",
    ),
    Fault(
        id="results-appended",
        about="a new result is named in the middle and stands at the end",
        file="dsa_compile/ir/edit.py",
        old="results.insert(at, node)",
        new="results.append(node)",
        kind="ir",
        culprit="returns",
    ),
    Fault(
        id="weights-of-first-of-kind",
        about="calls of one kind share the weights of the first",
        file="dsa_compile/weights/sharing.py",
        old="first.setdefault(made, Home(call.name, key))",
        new="first.setdefault((call.kind, key), Home(call.name, key))",
        kind="ir",
        culprit="weight_owners",
    ),
    Fault(
        id="floats-in-three-digits",
        about="numbers of a graph are written with three digits",
        file="dsa_compile/ir/argument_json.py",
        old='return value if math.isfinite(value) else {"float": str(float(value))}',
        new=(
            'return float(f"{value:.3g}") if math.isfinite(value) else {"float": str(float(value))}'
        ),
        kind="ir",
        culprit="argument_json",
    ),
    Fault(
        id="control-arguments-in-place",
        about="a call's arguments are kept between runs",
        file="dsa_compile/ir/execution.py",
        old="arguments = self._arguments.copy()",
        new="arguments = self._arguments",
        kind="ir",
        culprit="",
        control=True,
    ),
)
