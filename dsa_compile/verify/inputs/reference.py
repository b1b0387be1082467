"""Reference values: those of transformers' model, or of the program before any pass."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsa_compile.ir.plan import DEEPER, DRAFT, MODEL
from dsa_compile.ir.program import Program
from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.loader_check import misread_weights
from dsa_compile.verify.checks.report import EXPORT, PassReport
from dsa_compile.verify.comparison.agreement import UNLIKE, Agreement, compare, row_errors
from dsa_compile.verify.comparison.near_ties import TRIALS, is_few, noisy, steady_rows
from dsa_compile.verify.execution.exact import WIDE, ExactTensor, numbers
from dsa_compile.verify.execution.stages import Stage, layer_of, run_stage
from dsa_compile.verify.execution.traces import HIDDEN, LOGITS, CallTrace, Trace
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.prompt import Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

LIMIT = 1e-4
"""Relative error of a row between a layer in exact arithmetic and transformers' in fp32."""


def transformers_trace(recompiled: RecompiledArtifact, prompt: Prompt) -> Trace:
    """Values that transformers' model hands from layer to layer, as calls of the exported program
    see them: the residual stream, and with drafts that of the MTP layer.

    They are fp32, and nothing is rounded here: the layers are compared in exact arithmetic.

    Raises:
        UserError: the weights are random, or transformers refuses the model.
    """
    model = HfModel(recompiled.model_dir, recompiled.exported.spec)
    program = recompiled.exported
    sides = [_sides(model, program, ids) for ids in prompt.requests]
    dtype = program.config.dtype
    places = tuple(map(prompt.rows, prompt.wholes))
    trace = Trace(prompt.wholes, places, flat=False, exact=True)
    stage = _exported_stage(recompiled)
    for call in stage.plan.calls:
        done = CallTrace(call)
        for chunk, side in zip(prompt.wholes, sides, strict=True):
            region = stage.region(call.kind, chunk)
            given, result = side[call.name]
            done.regions.append(region)
            done.inputs.append({} if given is None else {HIDDEN: _as(given, dtype)})
            done.nodes.append({})
            done.outputs.append({_compared(region.outputs): _as(result, dtype)})
        trace.calls.append(done)
    return trace


def _exported_stage(recompiled: RecompiledArtifact) -> Stage:
    return Stage.of(recompiled.exported, ExactWeightStore(recompiled.store.source))


_Side = tuple[Tensor | None, Tensor]
"""The state that a call is given, None for one that makes it from tokens, and what it returns."""


def _sides(model: HfModel, program: Program, ids: Sequence[int]) -> dict[str, _Side]:
    """Input and output of every call by name, as transformers computes them for a sequence."""
    stream = model.residuals(ids)
    opening, *layers, head = program.plans[MODEL].calls
    found: dict[str, _Side] = {opening.name: (None, stream[0])}
    found |= {c.name: (stream[c.index], stream[c.index + 1]) for c in layers}
    found[head.name] = stream[-1], next(model.logits([ids]))
    if DRAFT not in program.plans:
        return found
    before = stream[-1]
    for plan, made in zip((DRAFT, DEEPER), model.drafts(ids, before), strict=True):
        opening, layer, head = program.plans[plan].calls
        found[opening.name] = before, made.joined
        found[layer.name] = made.joined, made.hidden
        found[head.name] = made.hidden, made.logits
        before = made.hidden
    return found


def _as(states: Tensor, dtype: torch.dtype) -> Tensor:
    """States [T, …] as one exact sequence [1, T, …] of a dtype."""
    return ExactTensor(states.to(WIDE)[None], dtype)


def _compared(names: Iterable[str]) -> str:
    return LOGITS if LOGITS in names else HIDDEN


def _noisy(reference: Trace, seed: int) -> Trace:
    """Trace with noise in the inputs of its layers."""
    calls = [
        replace(c, inputs=[{n: noisy(v, seed) for n, v in given.items()} for given in c.inputs])
        for c in reference.calls
    ]
    return replace(reference, calls=calls)


def _apart(theirs: Tensor, ours: Tensor) -> Tensor:
    return row_errors(*(numbers(value).flatten(1) for value in (theirs, ours)))


def compare_with_transformers(
    recompiled: RecompiledArtifact, prompt: Prompt
) -> dict[int | str, Agreement]:
    """Agreement of each layer of the exported program with transformers', given the same input.

    The MTP layer and what is before and after it count as any other. A layer of the model that the
    program leaves out does not agree. Rows that hang on near equals do not count.
    """
    reference = transformers_trace(recompiled, prompt)
    stage = _exported_stage(recompiled)
    made = run_stage(stage, prompt, given=reference)
    found: dict[int | str, Agreement] = {}
    again: list[Trace] = []
    for index, call in enumerate(made.calls):
        key = _compared(call.outputs[0])
        theirs, ours = reference.result(index, key), made.result(index, key)
        layer = layer_of(call.call)  # that which drafts is run by two plans
        agreement = compare(theirs, ours, len(prompt))
        if LIMIT < agreement.error < math.inf and is_few(_apart(theirs, ours) > LIMIT):
            again = again or [run_stage(stage, prompt, given=_noisy(reference, seed))
                              for seed in range(TRIALS)]  # fmt: skip
            kept = steady_rows(ours, (other.result(index, key) for other in again), LIMIT)
            mine, other = (numbers(value)[kept] for value in (theirs, ours))
            agreement = compare(mine, other, int(kept.sum()))
        found[layer] = found.get(layer, Agreement()).and_(agreement)
    if recompiled.exported.config.layers is None:
        missing = set(range(recompiled.exported.spec.num_hidden_layers)) - found.keys()
        found |= dict.fromkeys(sorted(missing), UNLIKE)
    return found


def export_report(recompiled: RecompiledArtifact, prompt: Prompt) -> PassReport:
    """The exported program against transformers' model, as a row of a report."""
    done = PassReport(EXPORT, "tolerance", 0)
    for layer, found in compare_with_transformers(recompiled, prompt).items():
        done.layers[str(layer)] = (found.typical, found.error)
        if found.error > LIMIT and not done.problem:
            where = f"layer {layer}" if isinstance(layer, int) else layer
            done.problem = f"{where} differs from transformers' model by {found.error:.1e}"
    if done.problem:
        exported = recompiled.exported
        layers = [call.index for call in exported.layers]
        misread = misread_weights(recompiled.model_dir, exported.spec, layers, exported.weights)
        for weight in misread:
            kind = "constant" if weight.computed else "weight"
            done.problem += f": {kind} {weight.name} {weight.error_phrase}, {weight.problem}"
            break
    return done
