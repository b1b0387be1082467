"""Exact arithmetic: graphs of any recipe run on fp64, so that only a wrong rewrite differs.

A rewrite that is right in mathematics gives, in fp64 and without any rounding to bf16 or FP8, what
the calls that it replaced give. An :class:`ExactTensor` says that it has the dtype of the recipe,
which the ops check, and holds fp64: a cast changes what it says and rounds nothing. The bytes of an
FP8 cache are fp64 too, each number once for every byte that it would take.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dsa_compile.ir.execution import reference
from dsa_compile.ops import REFERENCE

aten = torch.ops.aten
WIDE = torch.float64


class ExactTensor(Tensor):
    """A floating tensor, or the bytes of one, held in fp64.

    Attributes:
        wide: fp64, the numbers, with the shape and strides of the tensor.
    """

    wide: Tensor

    @staticmethod
    def __new__(cls, wide: Tensor, dtype: torch.dtype) -> "ExactTensor":
        """Take fp64 numbers as ``dtype``."""
        made: ExactTensor = Tensor._make_wrapper_subclass(
            cls, wide.shape, strides=wide.stride(), dtype=dtype, device=wide.device
        )
        made.wide = wide
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The numbers, and the dtype that stands for them."""
        return f"ExactTensor({self.wide}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one op on the numbers."""
        return _call(func, args, kwargs or {})


class ExactArithmetic(TorchDispatchMode):
    """While it is on, numbers made from integers or from nothing are exact as well.

    Args:
        unit: relative error by which the operands of every product are made wrong, at random; 0
            for none. What comes of it is the error that operands of such a format explain, whatever
            the length of the sums and the size of what they cancel.
    """

    def __init__(self, unit: float = 0.0) -> None:
        super().__init__()
        self._unit = unit
        self._random: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and the guard against it costs as much as a small op."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, a ``dsa`` op by its reference."""
        if func in REFERENCE:
            with self:
                return REFERENCE[func](*args, **(kwargs or {}))
        if self._unit and func in _PRODUCTS:
            args = tuple(map(self._rounded, args))
        return _call(func, args, kwargs or {})

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, ExactTensor):
            return value
        device = value.device
        random = self._random.setdefault(device, torch.Generator(device).manual_seed(0))
        noise = torch.rand(value.shape, generator=random, dtype=WIDE, device=device)
        noise.mul_(2).sub_(1)
        return ExactTensor(value.wide * noise.mul_(self._unit).add_(1), value.dtype)


def arithmetic(exact: bool, unit: float = 0.0) -> AbstractContextManager[Any]:
    """The mode in which calls run; ``unit`` as in :class:`ExactArithmetic`."""
    return ExactArithmetic(unit) if exact else nullcontext()


def exact_reference(node: fx.Node) -> Callable[..., Any] | None:
    """What to call for a node: its reference without the dispatcher, which knows no modes."""
    function = reference(node)
    return None if function is None else REFERENCE.get(cast(Any, function), function)


def to_exact(value: Any) -> Any:
    """Tensors of numbers as exact ones, in tuples and lists too."""
    return tree_map(_wrapped, value)


def numbers(value: Tensor) -> Tensor:
    """The fp64 numbers of an exact tensor; any other tensor as it is."""
    return value.wide if isinstance(value, ExactTensor) else value


def exact_cache(shape: Sequence[int], dtype: torch.dtype) -> ExactTensor:
    """A cache that nobody wrote: NaN everywhere."""
    return ExactTensor(torch.full(tuple(shape), torch.nan, dtype=WIDE), dtype)


def _wrapped(value: Any) -> Any:
    if isinstance(value, ExactTensor) or not isinstance(value, Tensor):
        return value
    return ExactTensor(value.to(WIDE), value.dtype) if value.is_floating_point() else value


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    given: list[Tensor] = []
    inner_args = [_inner(value, given) for value in args]
    inner_kwargs = {name: _inner(value, given) for name, value in kwargs.items()}
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype.is_floating_point:
        inner_kwargs["dtype"] = WIDE
    result = func(*inner_args, **inner_kwargs)
    return _outer(result, given, dtype or _promoted(given))


def _inner(value: Any, given: list[Tensor]) -> Any:
    """An argument with fp64 in place of exact tensors; adds those that are numbers to ``given``."""
    if type(value) is ExactTensor:  # most are, and this runs for every argument of every small op
        given.append(value)
        return value.wide
    if isinstance(value, Tensor):
        if value.is_floating_point():
            given.append(value)
            return value.to(WIDE)
    elif isinstance(value, list | tuple):
        return [_inner(entry, given) for entry in value]
    return value


def _outer(value: Any, given: list[Tensor], dtype: torch.dtype | None) -> Any:
    """A result with exact tensors in place of numbers; what was written in place is itself."""
    if isinstance(value, Tensor):
        for tensor in given:
            if type(tensor) is ExactTensor and tensor.wide is value:
                return tensor
        if value.is_floating_point() and type(value) is not ExactTensor:
            wide = value if value.dtype is WIDE else value.to(WIDE)
            return ExactTensor(wide, dtype or value.dtype)
        return value
    if isinstance(value, list | tuple):
        return type(value)([_outer(entry, given, dtype) for entry in value])
    return value


def _promoted(given: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype that numbers have together: those without dimensions count last."""
    if not given:
        return None
    first = given[0].dtype
    if all(t.dtype is first for t in given):  # nearly always
        return first
    dtypes = {t.dtype for t in given}
    dtypes = {t.dtype for t in given if t.dim()} or dtypes
    return functools.reduce(torch.promote_types, dtypes)


def _view_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, ExactTensor):
        made = value.view(dtype)
        return to_exact(made)  # type: ignore[no-any-return]
    if (
        not dtype.is_floating_point and dtype is not torch.uint8
    ):  # its bits, as the ordering of keys
        return value.wide.to(value.dtype).view(dtype)
    old, new = value.dtype.itemsize, dtype.itemsize
    if old == new:
        return ExactTensor(value.wide, dtype)
    if old < new:  # the bytes of one number must be together
        groups = value.wide.unflatten(-1, (-1, new // old))
        whole = (groups == groups[..., :1]).all(-1)
        return ExactTensor(torch.where(whole, groups[..., 0], torch.nan), dtype)
    return ExactTensor(value.wide.repeat_interleave(old // new, -1), dtype)


def _to_dtype(value: Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
    return _copied(value, dtype=dtype)


def _copied(value: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    # the device must be kept: tolist() reads on the host what it has copied there
    dtype = dtype or value.dtype
    inner = numbers(value)
    if dtype.is_floating_point:
        options = {k: v for k, v in kwargs.items() if k in ("memory_format", "device")}
        return ExactTensor(aten._to_copy.default(inner, dtype=WIDE, **options), dtype)
    return cast(Tensor, aten._to_copy.default(inner, dtype=dtype, **kwargs))


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    rows, matrices = numbers(x).to(WIDE), numbers(weight).to(WIDE)
    out = torch.zeros(rows.shape[0], matrices.shape[2], dtype=WIDE, device=rows.device)
    start = 0
    for number, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = rows[start:end] @ matrices[number]
            start = end
    return ExactTensor(out, x.dtype)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.view.dtype: _view_dtype,
    aten._to_copy.default: _copied,
    aten.to.dtype: _to_dtype,
    aten._grouped_mm.default: _grouped_mm,
}

_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.mm.out,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math.default,
    }
)
