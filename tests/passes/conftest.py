"""The fixture of every pass's test: before, expected, and what must hold of any rewrite."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.errors import CompileError
from dsa_compile.ir.dims import same_type
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.passes import Numerics, Pass, PassRecord
from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.verify.comparison.agreement import same_bits
from tests.passes.sketch import (
    SIZES,
    Fragment,
    RandomParameters,
    Source,
    canonical,
    execute,
    fragment,
    random_inputs,
)

TOLERANCE = 1e-4  # of passes that reorder fp32 sums, on inputs of unit variance


class PassCheck:
    """Runs passes on sketches; see :meth:`__call__` and :meth:`declines`."""

    def __call__(
        self,
        pass_: Pass,
        before: Source | Sequence[Source],
        expected: Source | Sequence[Source],
        *,
        rewrites: int | Mapping[str, int] = 1,
        prepare: Sequence[Pass] = (),
        inputs: Mapping[str, Tensor] | None = None,
        after_inputs: Mapping[str, Tensor] | None = None,
        sizes: Mapping[str, int] | None = None,
        relative: float | None = None,
        **geometry: Any,
    ) -> PassRecord:
        """Check that the pass turns ``before`` into ``expected`` and keeps the results.

        Args:
            pass_: what is tested.
            before: the regions it starts from.
            expected: regions it must leave, graph for graph; others are not compared.
            rewrites: sites per region, or those of the first region of ``before``.
            prepare: passes that run before, as they do in the pipeline.
            inputs: tensors by key; values not given are random.
            after_inputs: tensors that only the rewritten program takes, or takes differently.
            sizes: of the symbols, where the usual ones do not do.
            relative: for a pass that quantises, the norm that the difference of a result may have
                over that of the result; each element is held to :data:`TOLERANCE` without it.
            geometry: overrides of the tiny model's configuration.
        """
        program = fragment(*_several(before), **geometry)
        parameters = RandomParameters(program)
        for step in prepare:
            step.run(program, PassRecord(step.name, step.numerics))
            _sweep(program, step)
        tensors = random_inputs(program, {**SIZES, **(sizes or {})}) | dict(inputs or {})
        variant = next(iter(program.variants), None)
        wanted = execute(program, variant, parameters, tensors)
        kind = next(iter(program.regions))
        record = pass_(program)
        assert record.by_region == ({kind: rewrites} if isinstance(rewrites, int) else rewrites)
        for source in _several(expected):
            made = source.trace(program.world)
            assert canonical(program.regions[made.name]) == canonical(made)
        for variant in program.variants or (None,):
            given = tensors | dict(after_inputs or {})
            ours = execute(program, variant, parameters, given)
            if relative is None:
                _compare(ours, wanted, pass_.numerics)
            else:
                assert pass_.numerics is Numerics.TOLERANCE
                _compare_norms(ours, wanted, relative)
        _well_formed(program)
        _done(program, pass_)
        return record

    def declines(
        self,
        pass_: Pass,
        before: Source | Sequence[Source],
        *,
        prepare: Sequence[Pass] = (),
        untouched: bool = True,
        **geometry: Any,
    ) -> str:
        """The one-line error of a pass that finds fewer sites than it promises.

        ``untouched`` says that no other site was rewritten, so that the graphs are as they were.
        """
        program = fragment(*_several(before), **geometry)
        for step in prepare:
            step.run(program, PassRecord(step.name, step.numerics))
            _sweep(program, step)
        graphs = {name: canonical(region) for name, region in program.regions.items()}
        with pytest.raises(CompileError) as error:
            pass_(program)
        after = {name: canonical(region) for name, region in program.regions.items()}
        assert (after == graphs) is untouched
        message = str(error.value)
        assert "\n" not in message
        assert message.startswith(f"pass {pass_.name}: ")
        return message


@pytest.fixture
def check() -> PassCheck:
    """``check(pass_, before, expected)`` and ``check.declines(pass_, before)``."""
    return PassCheck()


@pytest.fixture
def leaves_alone() -> Callable[..., None]:
    """``leaves_alone(pass_, before)``: for passes that promise no number of sites."""

    def assert_untouched(pass_: Pass, before: Source) -> None:
        program = fragment(before)
        graphs = {name: canonical(region) for name, region in program.regions.items()}
        assert pass_(program).rewrites == 0
        assert {name: canonical(region) for name, region in program.regions.items()} == graphs

    return assert_untouched


def _several(sources: Source | Sequence[Source]) -> Sequence[Source]:
    return sources if isinstance(sources, list | tuple) else [sources]  # type: ignore[list-item]


def _sweep(program: Program, pass_: Pass) -> None:
    for region in program.regions.values():
        Editor(region, program.world, pass_.name).sweep()


def _compare(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], numerics: Numerics) -> None:
    for name, tensor in wanted.items():
        assert got[name].numel() == tensor.numel(), name
        assert tensor.numel() > 0, name
        ours = got[name].reshape(tensor.shape)
        if numerics is Numerics.BITWISE:
            assert same_bits(ours, tensor), name
        else:
            torch.testing.assert_close(ours, tensor, rtol=TOLERANCE, atol=TOLERANCE)


def _compare_norms(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], relative: float
) -> None:
    for name, tensor in wanted.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), name
        ours, theirs = got[name].double(), tensor.double()
        assert theirs.norm() > 0, name
        assert (ours - theirs).norm() <= relative * theirs.norm(), name


def _well_formed(program: Fragment) -> None:
    """Every node is typed and accounted for, and the weight plan holds what the graphs take."""
    taken: dict[str, dict[str, Any]] = {}
    for region in program.regions.values():
        for node in region.graph.nodes:
            if node.op == "output":
                continue
            assert node.meta["origin"], node
            assert "path" in node.meta, node
            if node.op == "placeholder":
                assert isinstance(node.meta["role"], Role)
                assert node.meta["key"]
                continue
            again = program.world.evaluate(node.target, node.args, node.kwargs)
            assert same_type(node.meta["val"], again), node
        weights = taken.setdefault(region.kind, {})
        for node in region.inputs_of(Role.WEIGHT):
            weights[node.meta["key"]] = (node.meta["val"].dtype, tuple(node.meta["val"].shape))
    planned = {
        kind: {key: (e.torch_dtype, e.shape) for key, e in program.weights.entries(kind).items()}
        for kind in taken
    }
    assert planned == taken


def _done(program: Program, pass_: Pass) -> None:
    """A second run finds nothing and changes nothing."""
    before = {name: region_to_python(region) for name, region in program.regions.items()}
    record = PassRecord(pass_.name, pass_.numerics)
    pass_.run(program, record)
    _sweep(program, pass_)
    assert not any(record.by_region.values()), record.by_region
    assert {name: region_to_python(r) for name, r in program.regions.items()} == before
