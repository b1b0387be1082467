"""Symbolic sizes: one fake-tensor world in which every graph of a program is typed.

A size that varies from step to step is a symbol with a name of ours (``T`` tokens, ``R``
requests); everything else is a number. A test that looks for an ``S×S`` tensor, or a printer that
shows shapes, reads those names.
"""

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

# Example sizes of the symbols. Distinct primes: equal examples would become one symbol, and a
# product or sum of two could pass for a third.
DIM_EXAMPLES = {
    "B": 3,  # sequences of a dense batch (before tokens are flattened)
    "S": 1009,  # tokens of each
    "T": 1013,  # tokens of a step, all requests together
    "R": 11,  # requests of a step
    "R+1": 12,
    "M": 13,  # blocks of the longest request
    "N": 17,  # rows whose logits are wanted
    "P": 19,  # blocks of the cache
}
# The text of symbols and of expressions over them, by world.
_NAMES: WeakKeyDictionary[ShapeEnv, dict[Any, str]] = WeakKeyDictionary()


def fake_mode(env: ShapeEnv | None = None) -> FakeTensorMode:
    """A mode that types tensors without memory.

    It keeps no results: with symbolic sizes, filling the cache and reading it both take longer than
    typing a call anew, and exporting a model takes twice the time.

    Args:
        env: of the symbols; one of its own if None.
    """
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


class FakeWorld:
    """The fake-tensor mode and symbols shared by all regions of a program."""

    def __init__(self) -> None:
        env = ShapeEnv()
        self.mode = fake_mode(env)
        self._names = _NAMES[env] = {}
        self._results: dict[Hashable, Any] = {}  # of ops, by what was given to them

    def tensor(self, shape: Sequence[int | str], dtype: torch.dtype) -> torch.Tensor:
        """A fake CPU tensor; a string size is a symbol of :data:`DIM_EXAMPLES`."""
        example = [DIM_EXAMPLES[size] if isinstance(size, str) else size for size in shape]
        dynamic = [
            DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in shape
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        real = torch.empty(example, dtype=dtype, device="meta")
        fake = self.mode.from_tensor(real, symbolic_context=context)
        made: Sequence[Any] = fake.shape
        for size, name in zip(made, shape, strict=True):
            if isinstance(size, torch.SymInt):
                self._names[size.node.expr] = str(name)
        with self.mode:
            return torch.empty_like(fake, device="cpu")

    def evaluate(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake result of calling ``target`` on nodes' ``meta["val"]`` and constants.

        Calls of an op on operands of the same types have one result: passes are replayed, and a
        symbolic size costs more than the rest of a rewrite.
        """

        def value(node: fx.Node) -> Any:
            return node.meta["val"]

        args, kwargs = fx.node.map_arg((args, kwargs), value)
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return self._typed(target, args, kwargs)
        key = (target, _type_key(args), _type_key(kwargs))
        if key not in self._results:
            self._results[key] = self._typed(target, args, kwargs)
        return self._results[key]

    def _typed(self, target: Any, args: Any, kwargs: Any) -> Any:
        # composite operators in C++ may read sizes as numbers (matmul of torch 2.11 does) and so
        # make a number of the symbol everywhere; their Python forms do not
        with enable_python_dispatcher(), self.mode, torch.no_grad():
            return target(*args, **kwargs)


def _type_key(value: Any) -> Hashable:
    """Key of all that a fake result may depend on: a fake's type, a constant and its type."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return (value.dtype, value.device, value.dim(), *map(_type_key, sizes))
    if isinstance(value, torch.SymInt):
        return value.node.expr  # type: ignore[no-any-return]
    if isinstance(value, tuple | list):
        return (type(value), *map(_type_key, value))
    if isinstance(value, dict):
        return tuple((name, _type_key(entry)) for name, entry in value.items())
    return (type(value), repr(value) if isinstance(value, float) else value)


def size_name(size: int | torch.SymInt) -> str:
    """``"T"`` for a lone symbol, ``"B*S"`` for an expression over symbols, ``"7168"`` else."""
    if isinstance(size, int):
        return str(size)
    names, expr = _NAMES[size.node.shape_env], size.node.expr
    if expr not in names:
        named = {s: sympy.Symbol(names.get(s, str(s))) for s in expr.free_symbols}
        names[expr] = str(expr.xreplace(named))
    return names[expr]


def symbol_names(size: int | torch.SymInt) -> set[str]:
    """Names of the symbols in a size; empty for a number."""
    if isinstance(size, int):
        return set()
    names = _NAMES[size.node.shape_env]
    return {names.get(symbol, str(symbol)) for symbol in size.node.expr.free_symbols}


def shape_names(value: torch.Tensor) -> tuple[str, ...]:
    """The sizes of a fake tensor by name."""
    return tuple(size_name(size) for size in value.shape)


def same_type(a: Any, b: Any) -> bool:
    """Whether two fake values agree in structure, dtype and (symbolic) shape."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and shape_names(a) == shape_names(b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same_type(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b)
