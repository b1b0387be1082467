"""Prove faults by steps alone: cheaper than :mod:`tests.planted_bugs.second.prove`.

    python -m tests.planted_bugs.third.prove_steps FOLDER OUT.json [ID …]

A program is run region by region, with the references of its ops, over the steps of
:mod:`tests.planted_bugs.second.serving`; nothing is written and no engine started. What is wrong in
the runtime, in what is exported or on streams is left to that module.
"""

import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from tests.planted_bugs.second.comparing import OWN_ERROR, judge
from tests.planted_bugs.second.fault import Fault
from tests.planted_bugs.second.prove import (
    Options,
    _note,
    _swaps,
    artifact_name,
    can_be_here,
    catalogue,
    export,
    in_child,
)

WORK = Path("/tmp/third_catalogue")


class Steps:
    """Executes batches over a program at the KERNEL level."""

    def __init__(self, program: Any, model_dir: Path) -> None:
        import torch

        from dsa_compile.ir.execution import compile_region
        from dsa_compile.ir.plan import MODEL
        from dsa_compile.weights.checkpoint import Checkpoint
        from tests.planted_bugs.second.serving import BLOCKS
        from tests.weights.loading import load_layer

        self._topk, self.block_size = program.spec.index_topk, program.config.block_size
        self.vocab_size = program.spec.vocab_size
        self._plan, self._program = program.plans[MODEL], program
        layers = [call.index for call in self._plan.layers]
        source = Checkpoint.open(model_dir, program.spec, layers)
        self._functions = {r.name: compile_region(r) for r in program.regions.values()}
        self._weights, self._caches = {}, {}
        for call in self._plan.calls:
            self._weights[call.name] = load_layer(program.weights, call.kind, call.vars, source)
            for node in program.region(call.kind, "long").inputs():
                if node.meta["role"] == "cache":
                    shape = (BLOCKS, *map(int, node.meta["val"].shape[1:]))
                    key = call.caches, node.meta["key"]
                    self._caches[key] = torch.zeros(shape, dtype=node.meta["val"].dtype)

    def execute(self, batch: Any) -> Any:
        """Logits of the rows that are wanted."""
        import torch

        values = {name: torch.from_numpy(a.copy()) for name, a in batch.arrays().items()}
        variant = "short" if batch.is_short(self._topk) else "long"
        silent = not len(batch.logit_rows)
        with torch.inference_mode():
            for call in self._plan.writing if silent else self._plan.calls:
                region = self._program.region(call.kind, variant)
                given = []
                for node in region.inputs():
                    role, key = node.meta["role"], node.meta["key"]
                    if role == "weight":
                        given.append(self._weights[call.name][key])
                    elif role == "cache":
                        given.append(self._caches[call.caches, key])
                    else:
                        given.append(values[key])
                results = self._functions[region.name](*given)
                values |= dict(zip(region.outputs, results, strict=True))
        return torch.empty((0, self.vocab_size)) if silent else values["logits"].float()


def compiled(program: Any) -> Any:
    """The program after every pass."""
    from dsa_compile.passes.added import assemble
    from dsa_compile.passes.manager import run_pipeline

    run_pipeline(program, lambda record: None, assemble(program.config, ())[1])
    return program


def observed(program: Any, model_dir: Path, ranks: bool) -> dict[str, Any]:
    """Logits of steps of a compiled program."""
    if ranks:
        from tests.planted_bugs.second.on_ranks import logits_on_ranks

        return logits_on_ranks(program, model_dir)
    from tests.planted_bugs.second.serving import logits_of_runner

    return logits_of_runner(Steps(program, model_dir))


def with_fault(fault: Fault, program: Any, model_dir: Path, ranks: bool, done: bool) -> Any:
    """Findings of a process with the fault in it; ``done`` where passes have run."""
    found: dict[str, Any] = {"stage": "steps" if done else "compile"}
    try:
        if fault.module in sys.modules:
            assert _swaps(fault), "more than functions is changed"
        else:
            folder = fault.plant(WORK / "planted")
            for name, module in list(sys.modules.items()):
                if name.split(".")[0] == "dsa_compile" and hasattr(module, "__path__"):
                    module.__path__ = [str(folder.joinpath(*name.split(".")))]
        if not done:
            compiled(program)
        found["stage"] = "steps"
        found["steps"] = observed(program, model_dir, ranks)
    except Exception as error:
        if "more than functions" in str(error):
            raise
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


def prove_group(model: str, recipe: str, options: Options, faults: list[Fault], out: Path) -> None:
    """Prove faults that share an export, in this process."""
    from tests.planted_bugs.second.models import model_dir

    source = model_dir(model, WORK)
    ranks = any(option in ("tp", "ep") for option, _ in options)
    program = export(model, recipe, "cpu", options, WORK)
    made = WORK / f"steps-{artifact_name(model, recipe, options)}.pickle"
    noise = OWN_ERROR[recipe]

    def judged(fault: Fault, right: Any, done: bool) -> None:
        found = in_child(with_fault, WORK, fault, program, source, ranks, done)
        if "error" in found and "status 1" in found["error"]:
            print("!! not here", fault.id, flush=True)
            return
        proof = {**judge({"steps": right}, found, noise), "by": "steps"}
        wrong = (proof["outcome"] == "harmless") is not fault.control
        _note(out, fault, proof)
        print("!!" if wrong else "  ", fault.id, json.dumps(proof)[:150], flush=True)

    def behind() -> None:
        compiled(program)
        right = observed(program, source, ranks)
        made.write_bytes(pickle.dumps(right))
        for fault in faults:
            if fault.file.startswith(("dsa_compile/ops/", "dsa_compile/weights/")):
                judged(fault, right, True)

    failed = in_child(behind, WORK, seconds=3000)
    if failed is not None:
        print("!! group", model, recipe, options, failed, flush=True)
        return
    right = pickle.loads(made.read_bytes())
    for fault in faults:
        if not fault.file.startswith(("dsa_compile/ops/", "dsa_compile/weights/")):
            if can_be_here(fault):
                judged(fault, right, False)
            else:
                print("!! not here", fault.id, flush=True)


def main() -> None:
    """Command line."""
    import torch
    import transformers.models.deepseek_v32.modeling_deepseek_v32  # noqa: F401

    global WORK
    torch.set_num_threads(1)
    folder, out, ids = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    WORK = WORK / out.stem
    WORK.mkdir(parents=True, exist_ok=True)
    faults = [
        f
        for f in catalogue(folder)
        if f.kind not in ("runtime", "stream") and not f.provider and (not ids or f.id in ids)
    ]
    group = lambda fault: (fault.model, fault.recipe, fault.options)  # noqa: E731
    for key, members in itertools.groupby(sorted(faults, key=group), group):
        in_child(prove_group, WORK, *key, list(members), out, seconds=9000)


if __name__ == "__main__":
    main()
