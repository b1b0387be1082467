"""Calls whose results are known are not run again, and nothing else is taken for known."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.ir.region import Region, Role
from dsa_compile.ops.cache import WRITE_INDEX_CACHE
from dsa_compile.verify.execution.deferred_weight import DeferredWeight
from dsa_compile.verify.execution.exact import exact_cache, to_exact
from dsa_compile.verify.execution.interpreter import Interpreter
from dsa_compile.verify.execution.known_calls import CacheStates, KnownCalls

aten = torch.ops.aten


def region(build: Callable[[fx.Graph], Any], caches: tuple[str, ...] = ()) -> Region:
    graph = fx.Graph()
    build(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            role = Role.CACHE if node.name in caches else Role.VALUE
            node.meta = {"role": role, "key": node.name}
    return Region("r", graph, ("out",))


def run(
    part: Region, known: KnownCalls, states: CacheStates | None = None, **given: Any
) -> dict[str, Any]:
    interpreter = Interpreter.of(part, exact=False)
    assert interpreter.pure
    return interpreter.run_unknown(given, known, states or CacheStates({}))


def chain(first: Any, factor: float = 2.0) -> Region:
    """``out = sin(first(x, factor))``, in nodes ``a`` and ``b``."""

    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        a = graph.create_node("call_function", first, (x, factor), name="a")
        graph.output((graph.create_node("call_function", aten.sin.default, (a,), name="b"),))

    return region(build)


def test_the_same_call_of_the_same_value_gives_the_very_result() -> None:
    x = torch.randn(3, 4)
    earlier = KnownCalls()
    before = run(chain(aten.mul.Tensor), earlier, x=x)
    after = run(chain(aten.mul.Tensor), KnownCalls(earlier), x=x)
    assert after["a"] is before["a"]
    assert after["b"] is before["b"]


def test_a_weight_is_made_for_a_call_that_is_not_known_alone() -> None:
    made = []

    def make() -> Tensor:
        made.append(torch.full((3, 4), 2.0))
        return made[-1]

    earlier, weight = KnownCalls(), DeferredWeight("w", make)
    before = run(chain(aten.mul.Tensor), earlier, x=weight)
    assert before["x"] is weight
    weight.release()
    after = run(chain(aten.mul.Tensor), KnownCalls(earlier), x=DeferredWeight("w", make))
    assert after["b"] is before["b"]
    assert len(made) == 1
    other = run(chain(aten.mul.Tensor, 3.0), KnownCalls(earlier), x=weight)
    assert len(made) == 2
    assert float(other["a"][0, 0]) == 6.0
    run(chain(aten.mul.Tensor), KnownCalls(earlier), x=DeferredWeight("v", make))
    assert len(made) == 3  # of another name


def test_what_another_op_makes_to_the_bit_is_known_behind_it() -> None:
    x = torch.randn(3, 4)
    earlier = KnownCalls()
    before = run(chain(aten.mul.Tensor, 2.0), earlier, x=x)
    after = run(chain(aten.div.Tensor, 0.5), KnownCalls(earlier), x=x)
    assert after["b"] is before["b"]


def test_other_bits_other_constants_and_other_layouts_are_not_known() -> None:
    x = torch.zeros(3, 3)
    earlier = KnownCalls()
    before = run(chain(aten.mul.Tensor, 0.0), earlier, x=x)
    negative = run(chain(aten.mul.Tensor, -0.0), KnownCalls(earlier), x=x)
    assert negative["b"] is not before["b"]
    assert torch.signbit(negative["b"]).all()
    assert run(chain(aten.mul.Tensor, 0.0), KnownCalls(earlier), x=x.clone())["b"] is before["b"]
    across = run(chain(aten.mul.Tensor, 0.0), KnownCalls(earlier), x=torch.zeros(3, 3).t())
    assert across["b"] is not before["b"]
    changed = x.clone()
    changed[0, 0] = 1.0
    assert run(chain(aten.add.Tensor, 1.0), KnownCalls(earlier), x=changed)["a"][0, 0] == 2.0


def test_several_results_are_known_one_by_one() -> None:
    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        both = graph.call_function(aten.max.dim, (x, 1))
        graph.output((graph.create_node("call_function", operator.getitem, (both, 0), name="v"),))

    x = torch.randn(3, 4)
    earlier = KnownCalls()
    before = run(region(build), earlier, x=x)
    assert run(region(build), KnownCalls(earlier), x=x)["v"] is before["v"]


def write_and_read() -> Region:
    """Write ``k`` to the cache, then sum all of it."""

    def build(graph: fx.Graph) -> None:
        k, cache, slots = (graph.placeholder(name) for name in ("k", "cache", "slots"))
        graph.call_function(WRITE_INDEX_CACHE, (k, cache, slots))
        total = graph.create_node("call_function", aten.nansum.default, (cache,), name="total")
        graph.output((total,))

    return region(build, caches=("cache",))


def cached(known: list[KnownCalls], rows: list[Tensor]) -> list[float]:
    """The totals after each row was written to a cache of its own."""
    cache = torch.full((1, 4, 2), torch.nan)
    states = CacheStates({"cache": cache})
    totals = []
    for place, (mine, row) in enumerate(zip(known, rows, strict=True)):
        made = run(
            write_and_read(), mine, states, k=row, cache=cache, slots=torch.tensor([place])
        )  # the slots are made anew each time: never known by their identity
        totals.append(float(made["total"]))
    states.catch_up()
    assert float(cache.nansum()) == totals[-1]
    return totals


def test_a_cache_is_known_by_what_was_written_to_it() -> None:
    rows = [torch.full((1, 2), value) for value in (1.0, 10.0)]
    earlier = [KnownCalls(), KnownCalls()]
    assert cached(earlier, rows) == [2.0, 22.0]
    other = [torch.full((1, 2), 5.0), rows[1]]
    assert cached([KnownCalls(each) for each in earlier], other) == [10.0, 30.0]


def test_writes_that_are_known_are_made_before_another_call_reads() -> None:
    cache = torch.full((1, 4, 2), torch.nan)
    k, slots = torch.full((1, 2), 3.0), torch.tensor([2])

    def build(graph: fx.Graph, op: Any) -> None:
        given = [graph.placeholder(name) for name in ("k", "cache", "slots")]
        graph.call_function(WRITE_INDEX_CACHE, tuple(given))
        graph.output((graph.create_node("call_function", op, (given[1],), name="out"),))

    summed = region(lambda graph: build(graph, aten.nansum.default), caches=("cache",))
    earlier = KnownCalls()
    first = CacheStates({"cache": cache})
    run(summed, earlier, first, k=k, cache=cache, slots=slots)
    again = torch.full((1, 4, 2), torch.nan)
    states = CacheStates({"cache": again})
    made = run(summed, KnownCalls(earlier), states, k=k, cache=again, slots=slots)
    assert float(made["out"]) == 6.0
    assert bool(again.isnan().all())  # put off: nothing reads it
    other = region(lambda graph: build(graph, aten.isnan.default), caches=("cache",))
    third = torch.full((1, 4, 2), torch.nan)
    states = CacheStates({"cache": third})
    made = run(other, KnownCalls(earlier), states, k=k, cache=third, slots=slots)
    assert int((~made["out"]).sum()) == 2


def test_exact_values_are_known_by_their_numbers() -> None:
    x = to_exact(torch.randn(2, 3))
    interpreter = Interpreter.of(chain(aten.mul.Tensor), exact=True)
    earlier = KnownCalls()
    before = interpreter.run_unknown({"x": x}, earlier, CacheStates({}))
    after = interpreter.run_unknown({"x": x}, KnownCalls(earlier), CacheStates({}))
    assert after["b"] is before["b"]
    assert exact_cache((1, 2), torch.float32).wide.isnan().all()


def test_a_graph_that_writes_its_inputs_is_not_pure() -> None:
    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        graph.output((graph.call_function(aten.add_.Tensor, (x, 1.0)),))

    assert not Interpreter.of(region(build), exact=False).pure
