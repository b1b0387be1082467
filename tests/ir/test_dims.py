import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsa_compile.ir.dims import (
    DIM_EXAMPLES,
    FakeWorld,
    fake_mode,
    same_type,
    shape_names,
    size_name,
    symbol_names,
)

aten = torch.ops.aten


def test_symbols_have_our_names_and_numbers_are_numbers() -> None:
    value = FakeWorld().tensor(("B", "S", 7), torch.bfloat16)
    assert shape_names(value) == ("B", "S", "7")
    assert value.dtype is torch.bfloat16
    assert value.device == torch.device("cpu")
    assert [symbol_names(size) for size in value.shape] == [{"B"}, {"S"}, set()]
    assert isinstance(value.shape[2], int)


def test_a_symbol_is_the_same_in_every_tensor_of_a_world() -> None:
    world = FakeWorld()
    a, b = world.tensor(("T", 8), torch.float32), world.tensor(("T",), torch.int64)
    assert a.shape[0].node.expr == b.shape[0].node.expr
    sized = world.evaluate(aten.cat.default, ([a, a],), {})
    assert shape_names(sized) == ("2*T", "8")


def test_every_symbol_keeps_apart_from_every_other() -> None:
    world = FakeWorld()
    value = world.tensor(tuple(DIM_EXAMPLES), torch.float32)
    assert shape_names(value) == tuple(DIM_EXAMPLES)


def test_sizes_that_are_products() -> None:
    world = FakeWorld()
    flat = world.evaluate(
        aten.reshape.default, (world.tensor(("B", "S", 4), torch.float32), [-1]), {}
    )
    assert size_name(flat.shape[0]) == "4*B*S"
    assert symbol_names(flat.shape[0]) == {"B", "S"}


def test_a_wrong_call_fails_where_it_is_made() -> None:
    world = FakeWorld()
    a, b = world.tensor(("T", 8), torch.float32), world.tensor(("T", 9), torch.float32)
    with pytest.raises(RuntimeError):
        world.evaluate(aten.add.Tensor, (a, b), {})


def test_types_agree_in_structure_dtype_and_symbolic_shape() -> None:
    world = FakeWorld()
    a = world.tensor(("T", 8), torch.float32)
    assert same_type(a, world.tensor(("T", 8), torch.float32))
    assert not same_type(a, world.tensor(("S", 8), torch.float32))
    assert not same_type(a, world.tensor((DIM_EXAMPLES["T"], 8), torch.float32))
    assert not same_type(a, world.tensor(("T", 8), torch.bfloat16))
    assert same_type((a, a), [a, a])
    assert not same_type((a, a), (a,))
    assert not same_type(a, (a,))


def test_worlds_do_not_share_names() -> None:
    one, other = FakeWorld(), FakeWorld()
    assert shape_names(one.tensor(("S",), torch.float32)) == ("S",)
    assert shape_names(other.tensor(("T",), torch.float32)) == ("T",)


def test_modes_keep_no_results() -> None:
    FakeTensorMode.cache_clear()
    world = FakeWorld()
    for mode in (world.mode, fake_mode()):
        with mode:
            torch.empty(3, 4) * 2
    x = world.tensor(["T", 4], torch.float32)
    with world.mode:
        x * 2
    assert FakeTensorMode.cache_info().size == 0
