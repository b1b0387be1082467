"""Programs written as small Python functions, for tests of passes.

::

    @region("head", value("x", "B", "S", 8), weight("norm.weight", 8))
    def before(x, norm):
        return aten.mul.Tensor(norm, x)

A sketch names the region's kind, perhaps with a variant, and its inputs; the function calls
overloads (``aten.mul.Tensor``, ``dsa.linear.default``) and may index results that are tuples. Sizes
given as text are symbols.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.architectures import spec_of
from dsa_compile.frontend.build import EMBED, HEAD, model_plan
from dsa_compile.frontend.export import Input, export_region
from dsa_compile.ir.dims import FakeWorld, size_name
from dsa_compile.ir.match import arguments
from dsa_compile.ir.plan import MODEL, Plan
from dsa_compile.ir.program import Place, Program, add_input
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import describe
from dsa_compile.verify.execution.interpreter import Interpreter
from dsa_compile.verify.execution.ranks import on_each_rank, parts_of
from dsa_compile.verify.execution.stages import result_nodes
from dsa_compile.weights.block_fp8 import quantize_rows
from dsa_compile.weights.materialize import materialize
from dsa_compile.weights.plan import Load, WeightEntry, WeightPlan
from dsa_compile.weights.windows import Window
from examples.small_models.models import tiny_config

Size = int | str


def value(key: str, *shape: Size, dtype: torch.dtype = torch.float32) -> Input:
    """A tensor handed on from the region before."""
    return Input(Role.VALUE, key, shape, dtype)


def batch(key: str, *shape: Size, dtype: torch.dtype = torch.int64) -> Input:
    """A tensor that describes the step."""
    return Input(Role.BATCH, key, shape, dtype)


def cache(key: str, *shape: Size, dtype: torch.dtype = torch.float32) -> Input:
    """A paged cache."""
    return Input(Role.CACHE, key, shape, dtype)


def weight(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Input:
    """A parameter; in a layer it is read from ``{layer}.<key>``."""
    return Input(Role.WEIGHT, key, shape, dtype)


class Source(Protocol):
    """Source that a region can be made from."""

    def trace(self, world: FakeWorld) -> Region:
        """A fresh region, typed in ``world``."""
        ...


@dataclass(frozen=True)
class Sketch:
    """A region as a function; see the module's text."""

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    path: str
    function: Callable[..., Any]

    def trace(self, world: FakeWorld) -> Region:
        """A fresh region; every node's module path is ``self.path``."""
        made = Region(self.name, fx.Graph(), self.outputs)
        tracer = fx.proxy.GraphAppendingTracer(made.graph)
        given = [add_input(made, world, i.role, i.key, i.shape, i.dtype) for i in self.inputs]
        results = self.function(*(fx.Proxy(node, tracer) for node in given))
        results = results if isinstance(results, tuple) else (results,)
        for node in made.graph.nodes:
            node.meta["origin"] = "sketch"
            if node.op == "call_function":
                node.meta["path"] = self.path
                node.meta["val"] = world.evaluate(node.target, node.args, node.kwargs)
        made.graph.output(tuple(result.node for result in results))
        return made


def region(
    name: str, *inputs: Input, outputs: tuple[str, ...] = ("logits",), path: str = "site"
) -> Callable[[Callable[..., Any]], Sketch]:
    """Make a sketch of a function of that many inputs."""
    return lambda function: Sketch(name, inputs, outputs, path, function)


@dataclass(frozen=True)
class Exported:
    """A module of the reference model as a region; ``module`` is built under the fake mode."""

    name: str
    module: Callable[[], torch.nn.Module]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]

    def trace(self, world: FakeWorld) -> Region:
        """A fresh export."""
        mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            module = self.module().eval()
        return export_region(self.name, module, self.inputs, self.outputs, mode, world)


_PLACES = {EMBED: Place.PROLOGUE, HEAD: Place.HEAD}


@dataclass
class Fragment(Program):
    """A program of which only some regions exist."""


def fragment(
    *sources: Source,
    config: CompileConfig | None = None,
    index_rope_interleaved: bool = False,
    scaled_queries: bool = False,
    **geometry: Any,
) -> Fragment:
    """A program of the given regions, each layer kind used by two layers.

    A head that reads every otherwise unread value is added unless there is one: a pass drops what
    nobody reads.

    Args:
        sources: sketches or exports.
        config: defaults to fp32.
        index_rope_interleaved: a fact of the model that its configuration does not have.
        scaled_queries: likewise.
        geometry: overrides of the tiny model's configuration.
    """
    world = FakeWorld()
    regions = {made.name: made for made in (source.trace(world) for source in sources)}
    if HEAD not in regions:
        regions[HEAD] = _reader(regions, world)
    all_kinds = list(dict.fromkeys(made.kind for made in regions.values()))
    kinds = [kind for kind in all_kinds if kind not in (EMBED, HEAD)]
    types = [{"dense": "dense", "moe": "sparse"}[kind] for kind in kinds for _ in range(2)]
    hf = tiny_config(len(types) or 1, mlp_layer_types=types or ["dense"], **geometry)
    spec = replace(
        spec_of(hf.to_dict()),
        index_rope_interleaved=index_rope_interleaved,
        scaled_queries=scaled_queries,
    )
    whole = model_plan(spec, None).calls
    calls = tuple(call for call in whole if call.kind in all_kinds)
    plan = WeightPlan()
    for made in regions.values():
        kind = made.kind
        for node in made.inputs_of(Role.WEIGHT):
            key, val = node.meta["key"], node.meta["val"]
            template = key if kind in (EMBED, HEAD) else "{layer}." + key
            dtype = str(val.dtype).removeprefix("torch.")
            plan.define(kind, key, WeightEntry(dtype, tuple(val.shape), Load(template)))
    model = Plan(calls, regions[HEAD].outputs)
    places = {kind: _PLACES.get(kind, Place.LAYER) for kind in all_kinds}
    return Fragment(spec, config or CompileConfig(), world, regions, places, {MODEL: model}, plan)


def _reader(regions: Mapping[str, Region], world: FakeWorld) -> Region:
    results = {
        name: node.meta["val"]
        for made in regions.values()
        for name, node in zip(made.outputs, made.graph.output_node().args[0], strict=True)
    }
    made = Region(HEAD, fx.Graph(), tuple(results))
    nodes = []
    for name, val in results.items():
        node = made.graph.placeholder(name)
        node.meta.update(role=Role.VALUE, key=name, val=val, path="", origin="reader")
        nodes.append(node)
    made.graph.output(tuple(nodes))
    return made


class RandomParameters:
    """A checkpoint of random parameters: those that a plan of plain loads names."""

    def __init__(self, program: Program) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        for call in program.calls:
            for entry in program.weights.entries(call.kind).values():
                (name,) = entry.sources(call.vars)
                made = torch.randn(entry.shape, generator=generator).to(entry.torch_dtype)
                self.tensors.setdefault(name, made)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return tuple(self.tensors[name].shape)

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        """Copy a parameter."""
        out.copy_(self.tensors[name][window])

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        """Quantise a parameter in blocks, each of ``stacked`` matrices on its own."""
        wide = self.tensors[name].float()
        outer, height = wide.shape[:-2], wide.shape[-2] // stacked
        made = [quantize_rows(m) for m in wide.reshape(-1, height, wide.shape[-1])]
        for out, part in ((values, 0), (scales, 1)):
            if out is not None:
                whole = torch.cat([pair[part] for pair in made])
                height = whole.shape[0] // math.prod(outer)
                out.copy_(whole.view(*outer, height, whole.shape[1])[window])

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """Make a weight of the plan."""
        materialize(entry, variables, self, out)


def execute(
    program: Program,
    variant: str | None,
    parameters: RandomParameters,
    inputs: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Results of the last region after one step, on all ranks of the program's layout; every
    layer gets its own copy of the caches."""
    values: dict[str, Tensor] = dict(inputs)
    last: tuple[str, ...] = ()
    for call in program.calls:
        made = program.region(call.kind, variant)
        caches = {n.meta["key"]: inputs[n.meta["key"]].clone() for n in made.inputs_of(Role.CACHE)}
        weights = {
            key: on_each_rank(entry, lambda each: materialize(each, call.vars, parameters))  # noqa: B023
            for key, entry in program.weights.entries(call.kind).items()
        }
        tables = {Role.VALUE: values, Role.BATCH: inputs, Role.CACHE: caches, Role.WEIGHT: weights}
        given = {n.name: tables[n.meta["role"]][n.meta["key"]] for n in made.inputs()}
        with torch.no_grad():
            nodes = Interpreter.of(made, exact=False).run(given)
        values |= {name: nodes[node.name] for name, node in result_nodes(made).items()}
        last = made.outputs
    return {name: _alike(values[name]) for name in last}


def _alike(value: Any) -> Any:
    """Value that all ranks return; lanes are given the same tokens."""
    first, *others = parts_of(value)
    for other in others:
        torch.testing.assert_close(other, first)
    return first


SIZES = {"B": 2, "S": 12, "T": 12, "N": 3, "B*S": 24}


def random_inputs(program: Program, sizes: Mapping[str, int] = SIZES) -> dict[str, Tensor]:
    """A random tensor for every value that comes from outside, by key, with zeros of both signs."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Tensor] = {}
    variant = next(iter(program.variants), None)
    for kind in program.order:
        for node in program.region(kind, variant).inputs_of(Role.VALUE):
            val = node.meta["val"]
            shape = [n if isinstance(n, int) else sizes[size_name(n)] for n in val.shape]
            if val.is_floating_point():
                flat = torch.randn(math.prod(shape), generator=generator)
                flat[::17], flat[5::17] = 0.0, -0.0
                made[node.meta["key"]] = flat.view(shape).to(val.dtype)
    return made


def canonical(made: Region) -> list[str]:
    """A region as text that does not depend on names, on order, or on defaults spelt out.

    Calls are numbered as they are first reached from the writes and the results; inputs appear by
    role and key; every line ends in the type.
    """
    lines: list[str] = []
    names: dict[fx.Node, str] = {}

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return visit(argument)
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(text, argument))}]"
        return repr(argument)

    def visit(node: fx.Node) -> str:
        if node in names:
            return names[node]
        if node.op == "placeholder":
            names[node] = f"{node.meta['role']}:{node.meta['key']}"
            lines.append(f"{names[node]}  {describe(node.meta['val'])!r}")
        else:
            given = ", ".join(map(text, arguments(node)[1]))
            names[node] = f"%{sum(line.startswith('%') for line in lines)}"
            lines.append(f"{names[node]} = {node.target}({given})  {describe(node.meta['val'])!r}")
        return names[node]

    for node in made.graph.nodes:
        if node.op == "call_function" and node.is_impure():
            visit(node)
    results = [text(result) for result in made.graph.output_node().args[0]]
    returned = ", ".join(
        f"{name}={result}" for name, result in zip(made.outputs, results, strict=True)
    )
    return [*lines, f"return {returned}"]
