"""Exact arithmetic: graphs of any recipe run on fp64, so that only a wrong rewrite differs.

A rewrite that is right in mathematics gives, in fp64 and without any rounding to bf16 or FP8, what
the calls that it replaced give. An :class:`ExactTensor` says that it has the dtype of the recipe,
which the ops check, and holds fp64: a cast changes what it says and rounds nothing. The bytes of an
FP8 cache are fp64 too, each number once for every byte that it would take.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dsa_compile.ir.execution import reference
from dsa_compile.ops import REFERENCE
from dsa_compile.verify.execution.recording import Recording
from dsa_compile.verify.execution.taped_calls import TapedCalls

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
    """Mode in which numbers made from integers or from nothing are exact as well.

    Args:
        unit: relative error by which the operands of every product are made wrong, at random; 0
            for none. What comes of it is the error that operands of such a format explain, whatever
            the length of the sums and the size of what they cancel.
    """

    def __init__(self, unit: float = 0.0) -> None:
        super().__init__()
        self._unit = unit
        self._random: dict[torch.device, torch.Generator] = {}
        self._recording: Recording | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and the guard against it costs as much as a small op."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, a ``dsa`` op by its reference."""
        if func in REFERENCE:
            return self.run(REFERENCE[func], *args, **(kwargs or {}))
        if self._unit and func is aten._grouped_mm.default:
            return self._noisy_grouped_mm(*args)
        if self._unit and func in _PRODUCTS:
            args = tuple(map(self._rounded, args))
        return _call(func, args, kwargs or {}, self._recording)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in this mode: by the tape of an earlier call, if there is one."""
        call = None if self._recording else _TAPES.call(function, args, kwargs, bool(self._unit))
        if call is None:
            with self:
                return function(*args, **kwargs)
        played = call.play(self._noisy)
        if played is not None:
            return played[0]
        self._recording = Recording(call.inputs, self._noisy)
        try:
            with self._recording, self:
                made = function(*args, **kwargs)
            call.keep(self._recording, made)
        finally:
            self._recording = None
        return made

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, ExactTensor):
            return value
        return ExactTensor(_ran(self._recording, self._noisy, (value.wide,)), value.dtype)

    def _noisy(self, wide: Tensor) -> Tensor:
        device = wide.device
        random = self._random.setdefault(device, torch.Generator(device).manual_seed(0))
        noise = torch.empty_like(wide).uniform_(-1, 1, generator=random)
        return noise.mul_(self._unit).add_(1).mul_(wide)  # a unit may be below zero

    def _noisy_grouped_mm(self, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Only matrices with rows are made wrong: those of all experts are gigabytes."""
        if self._recording is not None:
            self._recording.give_up()  # which matrices these are depends on numbers
        made = _products(self._noisy(numbers(x)), numbers(weight), offs, self._noisy)
        return ExactTensor(made, x.dtype)


def exact_reference(node: fx.Node) -> Callable[..., Any] | None:
    """Reference of a node without the dispatcher, which knows no modes; None if it has none."""
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


def _call(func: Any, args: Any, kwargs: dict[str, Any], recording: Recording | None = None) -> Any:
    special = _SPECIAL.get(func)
    if special is not None:
        return special(recording, *args, **kwargs)
    given: list[Tensor] = []
    inner_args = [_inner(value, given, recording) for value in args]
    inner_kwargs = {name: _inner(value, given, recording) for name, value in kwargs.items()}
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype.is_floating_point:
        inner_kwargs["dtype"] = WIDE
    result = _ran(recording, func, inner_args, inner_kwargs)
    return _outer(result, given, dtype or _promoted(given), recording)


def _ran(
    recording: Recording | None,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a function of fp64 numbers and integers; it is written down if there is a recording."""
    if recording is None:
        return function(*args, **(kwargs or {}))
    return recording.run(function, args, kwargs or {})


def _inner(value: Any, given: list[Tensor], recording: Recording | None) -> Any:
    """An argument with fp64 in place of exact tensors; adds those that are numbers to ``given``."""
    if type(value) is ExactTensor:  # most are, and this runs for every argument of every small op
        given.append(value)
        return value.wide
    if isinstance(value, Tensor):
        if value.is_floating_point():
            given.append(value)
            return _widened(value, recording)
    elif isinstance(value, list | tuple):
        return [_inner(entry, given, recording) for entry in value]
    return value


def _outer(
    value: Any, given: list[Tensor], dtype: torch.dtype | None, recording: Recording | None
) -> Any:
    """A result with exact tensors in place of numbers; what was written in place is itself."""
    if isinstance(value, Tensor):
        for tensor in given:
            if type(tensor) is ExactTensor and tensor.wide is value:
                return tensor
        if value.is_floating_point() and type(value) is not ExactTensor:
            return ExactTensor(_widened(value, recording), dtype or value.dtype)
        return value
    if isinstance(value, list | tuple):
        return type(value)([_outer(entry, given, dtype, recording) for entry in value])
    return value


def _widened(value: Tensor, recording: Recording | None) -> Tensor:
    if value.dtype is WIDE:
        return value
    made: Tensor = _ran(recording, aten._to_copy.default, (value,), {"dtype": WIDE})
    return made


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


def _view_dtype(recording: Recording | None, value: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, ExactTensor):
        bits: Tensor = _ran(recording, aten.view.dtype, (value, dtype))
        exact = bits.is_floating_point()
        return ExactTensor(_widened(bits, recording), dtype) if exact else bits
    if (
        not dtype.is_floating_point and dtype is not torch.uint8
    ):  # its bits, as the ordering of keys
        return cast(Tensor, _ran(recording, _bits, (value.wide, value.dtype, dtype)))
    old, new = value.dtype.itemsize, dtype.itemsize
    if old == new:
        return ExactTensor(value.wide, dtype)
    if old < new:
        return ExactTensor(_ran(recording, _joined, (value.wide, new // old)), dtype)
    return ExactTensor(_ran(recording, _parted, (value.wide, old // new)), dtype)


def _bits(wide: Tensor, said: torch.dtype, dtype: torch.dtype) -> Tensor:
    return wide.to(said).view(dtype)


def _joined(wide: Tensor, count: int) -> Tensor:
    """Numbers of their bytes; the bytes of one number must be together."""
    groups = wide.unflatten(-1, (-1, count))
    whole = (groups == groups[..., :1]).all(-1)
    return torch.where(whole, groups[..., 0], torch.nan)


def _parted(wide: Tensor, count: int) -> Tensor:
    """Each number once for every byte of it."""
    return wide.repeat_interleave(count, -1)


def _to_dtype(
    recording: Recording | None, value: Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Tensor:
    return _copied(recording, value, dtype=dtype)


def _copied(
    recording: Recording | None, value: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> Tensor:
    # the device must be kept: tolist() reads on the host what it has copied there
    dtype = dtype or value.dtype
    inner = (numbers(value),)
    if dtype.is_floating_point:
        options = {k: v for k, v in kwargs.items() if k in ("memory_format", "device")}
        made = _ran(recording, aten._to_copy.default, inner, {"dtype": WIDE, **options})
        return ExactTensor(made, dtype)
    made = _ran(recording, aten._to_copy.default, inner, {"dtype": dtype, **kwargs})
    return cast(Tensor, made)


def _grouped_mm(
    recording: Recording | None, x: Tensor, weight: Tensor, offs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    return ExactTensor(_ran(recording, _products, (numbers(x), numbers(weight), offs)), x.dtype)


def _products(
    x: Tensor, weight: Tensor, offs: Tensor, changed: Callable[[Tensor], Tensor] = lambda of: of
) -> Tensor:
    """Rows of x ``[S, in]`` times matrices ``[E, in, out]``; of each, up to the row ``offs[e]``."""
    rows, matrices = x.to(WIDE), weight.to(WIDE)
    out = torch.zeros(rows.shape[0], matrices.shape[2], dtype=WIDE, device=rows.device)
    start = 0
    for number, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = rows[start:end] @ changed(matrices[number])
            start = end
    return out


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
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math.default,
    }
)

_TAPES = TapedCalls()
