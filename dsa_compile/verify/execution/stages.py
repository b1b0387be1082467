"""Run a program at any stage on the CPU's reference ops, and keep every value in it.

Before its caches come, a program takes a whole sequence at once; from then on it is given the
sequence in steps, chunks of a prefill and then single tokens, as a server would, and the variant of
each step is the one the runtime would choose. Layers are run one after another, each over all
steps: that is the same computation, as a layer's caches are its own.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.ir.plan import Call, Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import FACTS, Form
from dsa_compile.verify.execution.deferred_weight import DeferredWeight, release, undeferred
from dsa_compile.verify.execution.exact import exact_cache
from dsa_compile.verify.execution.handed_selections import SELECTED, convert_selection
from dsa_compile.verify.execution.interpreter import Interpreter, Values
from dsa_compile.verify.execution.known_calls import (
    CacheStates,
    KnownCalls,
    number_of,
)
from dsa_compile.verify.execution.ranks import on_ranks
from dsa_compile.verify.execution.traces import IN_STEP, CallTrace, Trace
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Chunk, Prompt
from dsa_compile.weights.plan import WeightPlan

# What takes a whole sequence at once.
_DENSE = frozenset(op for op, facts in FACTS.items() if facts.form is Form.DENSE)

Handed = Callable[[Region, Region], Sequence[tuple[str, str]]]
"""Calls of a region in whose place another has an input value, by name and by key."""


@dataclass(frozen=True)
class StageWeights:
    """The weights of a stage.

    Attributes:
        store: makes them.
        plan: how.
    """

    store: WeightStore
    plan: WeightPlan

    def of(self, call: Call, keys: Collection[str]) -> dict[str, Tensor]:
        """Weights by key, for one call of a step."""
        return self.store.planned(self.plan).of(call, keys)

    def deferred(self, call: Call, keys: Collection[str]) -> dict[str, DeferredWeight]:
        """Weights by key as of :meth:`of`, each made when it is taken."""
        entries = self.plan.entries(call.kind)
        return {
            key: DeferredWeight(
                ("weight", number_of((entries[key], entries[key].sources(call.vars)))),
                partial(self.store.get, call, key, entries[key]),
            )
            for key in keys
        }


@dataclass(frozen=True)
class Stage:
    """A program as it stands after some rewrites, with its weights.

    Attributes:
        regions: by name.
        plan: what a step calls, and what drafts call after it.
        weights: as this stage takes them.
        topk: ``index_topk`` of the model.
        exact: whether it runs in exact arithmetic.
    """

    regions: Mapping[str, Region]
    plan: Plan
    weights: StageWeights
    topk: int
    exact: bool = False
    _interpreters: dict[str, Interpreter] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, program: Program, store: WeightStore) -> "Stage":
        """A program with weights made by its own plan; exact ones make exact arithmetic."""
        return cls(
            program.regions,
            program.whole,
            StageWeights(store, program.weights),
            program.spec.index_topk,
            isinstance(store, ExactWeightStore),
        )

    @property
    def flat(self) -> bool:
        """Whether tokens are [T], and no longer [B, S]."""
        return all(
            len(node.meta["val"].shape) == 1
            for region in self.regions.values()
            for node in region.inputs_of(Role.BATCH)
            if node.meta["key"] == "input_ids"
        )

    @property
    def paged(self) -> bool:
        """Whether every layer has its caches, so that a sequence may come in steps."""
        kinds = {call.kind for call in self.plan.calls if call.caches is not None}
        return self.flat and all(
            region.inputs_of(Role.CACHE)
            and not any(node.target in _DENSE for node in region.graph.nodes)
            for region in self.regions.values()
            if region.kind in kinds
        )

    def chunks(self, prompt: Prompt) -> tuple[Chunk, ...]:
        """The steps in which this stage takes a sequence."""
        return prompt.chunks if self.paged else prompt.wholes

    def takes_as(self, trace: Trace, prompt: Prompt) -> bool:
        """Whether this stage takes a sequence in the steps and the layout of a trace."""
        return self.flat == trace.flat and self.chunks(prompt) == trace.chunks

    def region(self, kind: str, chunk: Chunk) -> Region:
        """Region that a step of that context runs."""
        return self.regions[chunk.region(kind, self.regions, self.topk)]

    def interpreter(self, region: Region) -> Interpreter:
        """Interpreter of one of this stage's regions; made once."""
        if region.name not in self._interpreters:
            self._interpreters[region.name] = Interpreter.of(region, self.exact)
        return self._interpreters[region.name]

    def record(self, region: Region, tables: Mapping[Role, Mapping[str, Any]]) -> Values:
        """Run a region of this stage and return the value of every node by name.

        Args:
            region: one of this stage's.
            tables: the inputs by role and key.
        """
        return self.interpreter(region).run(_given(region, tables))


@torch.no_grad()
def run_stage(
    stage: Stage,
    prompt: Prompt,
    *,
    given: Trace | None = None,
    handed: Handed | None = None,
    watch: bool = False,
    known: Trace | None = None,
) -> Trace:
    """Run a sequence through a stage.

    Args:
        stage: what to run.
        prompt: the sequence.
        given: where the layers' inputs come from, as far as this trace has them; an error then
            stays in the layer that made it.
        handed: returns the inputs that a call of the layer in ``given`` computes; used if ``given``
            was watched.
        watch: keep the value of every node.
        known: a trace of the same model and prompt, watched, whose values are taken over where a
            call is given the same; ``given`` if None. Used if this one is watched as well.
    """
    chunks = stage.chunks(prompt)
    places = tuple(map(prompt.rows, chunks))
    trace = Trace(chunks, places, stage.flat, exact=stage.exact, block_size=prompt.block_size)
    earlier = _usable(trace, (known, given)) if watch else None
    if earlier is None:
        trace.batches = [prompt.batch(chunk, trace.flat) for chunk in chunks]
    else:
        trace.batches = earlier.batches
    values: list[dict[str, Tensor]] = [{} for _ in trace.chunks]
    for index, call in enumerate(stage.plan.calls):
        done = CallTrace(call)
        states = CacheStates({})
        regions = [stage.region(call.kind, chunk) for chunk in trace.chunks]
        keys = dict.fromkeys(key for region in regions for key in weight_keys(region))
        weights = stage.weights.deferred(call, keys)
        for number, region in enumerate(regions):
            if given is not None:
                values[number] |= _taken(given, index, number, trace)
            if given is not None and handed is not None and trace.alike(given) and given.watched:
                theirs = given.calls[index]
                pairs = handed(theirs.regions[number], region)
                values[number] |= {key: theirs.nodes[number][name] for name, key in pairs}
            inputs = dict(values[number])
            if SELECTED in inputs:
                source = trace
                if given is not None and trace.alike(given):
                    source = given if SELECTED in given.calls[index].inputs[number] else trace
                inputs[SELECTED] = convert_selection(
                    inputs[SELECTED],
                    source.calls[source.maker(index, number, SELECTED)].regions[number],
                    region,
                    trace.batches[number],
                    prompt.block_size,
                )
            tables: dict[Role, Mapping[str, Any]] = {
                Role.VALUE: inputs,
                Role.BATCH: trace.batches[number],
                Role.CACHE: caches_for(region, prompt, states.caches, stage.exact),
                Role.WEIGHT: weights,
            }
            if watch:
                mine = KnownCalls(None if earlier is None else earlier.calls[index].known[number])
                nodes = _run_known(stage, region, tables, mine, states)
                mine.close()
                done.known.append(mine)
            else:
                nodes = stage.record(region, tables)
            done.regions.append(region)
            done.inputs.append(inputs)
            done.nodes.append(_without_weights(region, nodes) if watch else {})
            done.outputs.append(_results(region, nodes))
            values[number] |= done.outputs[-1]
        states.catch_up()
        release(weights.values())
        trace.calls.append(done)
    return trace


def _usable(trace: Trace, candidates: Sequence[Trace | None]) -> Trace | None:
    """The first trace whose values may be those of another."""
    for other in candidates:
        if other is None or not trace.alike(other) or trace.exact != other.exact:
            continue
        if all(len(call.known) == len(trace.chunks) for call in other.calls):
            return other
    return None


def _run_known(
    stage: Stage,
    region: Region,
    tables: Mapping[Role, Mapping[str, Any]],
    known: KnownCalls,
    states: CacheStates,
) -> Values:
    interpreter = stage.interpreter(region)
    if interpreter.pure:
        return interpreter.run_unknown(_given(region, tables), known, states)
    states.catch_up()
    batch = {key: value.clone() for key, value in tables[Role.BATCH].items()}
    nodes = interpreter.run(_given(region, {**tables, Role.BATCH: batch}))
    states.written(tuple(tables[Role.CACHE]), object())
    return nodes


def _given(region: Region, tables: Mapping[Role, Mapping[str, Any]]) -> Values:
    return {n.name: tables[n.meta["role"]][n.meta["key"]] for n in region.inputs()}


def _results(region: Region, values: Values) -> dict[str, Tensor]:
    return {name: undeferred(values[node.name]) for name, node in result_nodes(region).items()}


def _without_weights(region: Region, values: Values) -> Values:
    """Values that a trace keeps: it would else hold the weights of all layers."""
    weights = {node.name for node in region.inputs_of(Role.WEIGHT)}
    return {name: value for name, value in values.items() if name not in weights}


def result_nodes(region: Region) -> dict[str, fx.Node]:
    """Nodes that a region returns, by name."""
    nodes: Any = region.graph.output_node().args[0]
    return dict(zip(region.outputs, nodes, strict=True))


def layer_of(call: Call) -> int | str:
    """Number of the layer that a call runs, or the call's name."""
    return call.name if call.layer is None else call.layer


def weight_keys(region: Region) -> list[str]:
    """Keys of the weights that a region takes."""
    return [node.meta["key"] for node in region.inputs_of(Role.WEIGHT)]


def caches_for(
    region: Region, prompt: Prompt, caches: dict[str, Tensor], exact: bool = False
) -> dict[str, Tensor]:
    """A layer's caches, made where they are missing; rows that nobody wrote are NaN."""
    for node in region.inputs_of(Role.CACHE):
        key = node.meta["key"]
        if key not in caches:
            _, block, width = node.meta["val"].shape
            shape = (prompt.num_blocks, int(block), int(width))
            caches[key] = unwritten(shape, node.meta["val"].dtype, exact)
    return caches


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, exact: bool) -> Tensor:
    """A cache in which every number is NaN."""
    if exact:
        return exact_cache(shape, dtype)
    made = torch.empty(shape, dtype=dtype)
    made.view(torch.uint8).fill_(0xFF)
    return made


def _taken(given: Trace, index: int, number: int, trace: Trace) -> Iterator[tuple[str, Tensor]]:
    """Inputs of one call as ``given`` has them, in the layout of ``trace``."""
    inputs = given.calls[index].inputs
    if trace.alike(given):
        return iter(inputs[number].items())
    keys = inputs[0].keys() & set.intersection(*(set(i) for i in inputs))
    places, padding = trace.places[number], trace.chunks[number].padding
    rows = torch.cat((places, places[:1].expand(padding)))
    taken = on_ranks(operator.getitem)
    return iter([(k, taken(given.rows(index, k), rows)) for k in keys - IN_STEP])
