"""One call of an op: by its reference, in exact arithmetic, and by a kernel that may take it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from dsa_compile.artifact.records import KernelRecord
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.region import Role
from dsa_compile.ops import EXPERTS, EXPERTS_FP8, FACTS, REFERENCE, Family
from dsa_compile.verify.comparison.kernel_errors import kernel_error, result_numbers
from dsa_compile.verify.comparison.rounding import UNIT
from dsa_compile.verify.comparison.selected_rows import selection_problem
from dsa_compile.verify.execution.cache_numbers import CacheFormat
from dsa_compile.verify.execution.exact import ExactArithmetic, to_exact
from dsa_compile.verify.inputs.prompt import Chunk

_HOST = frozenset({Family.INDEX_SELECTION, Family.CACHE_WRITE, Family.ATTENTION_INPUTS})
"""Families whose references read tensors on the host."""

_SAMPLED = 4
"""Rows of a call that are run in exact arithmetic: as many experts in fp64 as fit into memory."""

_WHOLE = frozenset({Family.PROMPT_ATTENTION})
"""Families in which a token's result is of other tokens of the step: all rows are run so."""

_EXPERTS = (EXPERTS, EXPERTS_FP8)

_TIED = 2.0**-14
"""Relative error of the operands of a router's scores that leaves a choice as it is: else it is a
tie. Sums of fp32 over thousands of values are off by less."""

Judged = tuple[str, float]
"""Problem or the empty text, and the error as a multiple of what is allowed."""


@dataclass(frozen=True)
class OpCall:
    """A call of a graph with its operands, on the device.

    Attributes:
        node: the call.
        args: as the graph gives them; caches as they are before the call.
        chunk: the step.
        spec: the model's.
    """

    node: fx.Node
    args: tuple[Any, ...]
    chunk: Chunk
    spec: ModelSpec

    @property
    def family(self) -> Family:
        """The family of the op."""
        return FACTS[self._op].family

    @property
    def _op(self) -> Any:
        return self.node.target

    def reference(self) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The operands after the call, and its results, on the device."""
        device = self._tensors()[0].device
        host = self.family in _HOST
        args = _moved(_cloned(self.args, self._written()), torch.device("cpu") if host else device)
        with torch.device("cpu" if host else device):
            made = REFERENCE[self._op](*args)
        return _moved(args, device), [r.to(device) for r in _listed(made)]

    def kernel(self, function: Callable[..., Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The operands after the call of a kernel, and its results."""
        args = _cloned(self.args, self._written())
        return args, _listed(function(*args))

    def keep(self, after: Sequence[Any]) -> None:
        """Take over the caches that the reference wrote."""
        for number in self._written():
            self.args[number].copy_(after[number])

    def judge(
        self,
        theirs: tuple[tuple[Any, ...], list[Tensor]],
        ours: tuple[tuple[Any, ...], list[Tensor]],
    ) -> Judged:
        """Compare a kernel's results and caches with the reference's."""
        for a, b in zip(theirs[1], ours[1], strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"gives {b.dtype} {list(b.shape)} for {a.dtype} {list(a.shape)}", math.inf
        if self.family is Family.INDEX_SELECTION:
            return self._judge_selection(ours[1][0])
        if self.family is Family.ROUTER:
            return self._judge_router(theirs[1], ours[1])
        found = [self._judge_written(number, theirs[0], ours[0]) for number in self._written()]
        return max(
            (*found, *self._judge_results(theirs[1], ours[1])), key=_worse, default=("", 0.0)
        )

    def _judge_selection(self, chosen: Tensor) -> Judged:
        given = dict(zip(self._names(), self.args, strict=False))
        cache = given["cache"]
        keys = self._format(self._names().index("cache")).rows(cache)
        batch = (given["block_tables"], given["cu_seqlens"], given["context_lens"], cache.shape[1])
        scale = given.get("scale", 1.0)
        return selection_problem(chosen, given["q"], given["weights"], keys, batch, scale)

    def _judge_written(self, number: int, theirs: Sequence[Any], ours: Sequence[Any]) -> Judged:
        before, wanted, found = self.args[number], theirs[number], ours[number]
        slots = self.args[self._names().index("slot_mapping")]
        slots = slots[slots >= 0]
        written = torch.zeros(
            wanted.shape[0] * wanted.shape[1], dtype=torch.bool, device=slots.device
        )
        written[slots] = True
        kind = self._format(number)
        left = ~kind.bytes_of(written, wanted)
        if not torch.equal(_octets(found)[left], _octets(before)[left]):
            return "writes rows of the cache that the reference leaves", math.inf
        if not len(slots):
            return "", 0.0
        rows = (kind.rows(found)[slots], kind.rows(wanted)[slots])
        return self._compare(rows[0], rows[1], None, None, wanted.dtype)

    def _judge_results(self, theirs: list[Tensor], ours: list[Tensor]) -> Iterator[Judged]:
        tokens = self.chunk.tokens
        truth = noisy = None
        sample = self._sample()
        if theirs and sample is not None:
            truth, noisy = self._exact(sample, 0.0), self._exact(sample, self._unit())
        wanted, found = result_numbers(theirs), result_numbers(ours)
        for number, result in enumerate(theirs):
            if not result.dtype.is_floating_point:
                right = torch.equal(result[:tokens], ours[number][:tokens])
                yield ("", 0.0) if right else ("selects other rows", math.inf)
            elif number in wanted:
                yield self._compare(
                    found[number][:tokens],
                    wanted[number][:tokens],
                    sample,
                    (truth and truth[number], noisy and noisy[number]),
                    result.dtype,
                )

    def _compare(
        self, found: Tensor, wanted: Tensor, sample: Tensor | None, exact: Any, dtype: torch.dtype
    ) -> Judged:
        if not torch.equal(found.isfinite(), wanted.isfinite()):
            return "is not finite where the reference is, or the other way round", math.inf
        truth, noisy = exact or (None, None)
        sampled = torch.arange(0) if sample is None else sample
        error = kernel_error(found, wanted, sampled, truth, noisy, dtype)
        return error.problem, error.ratio

    def _judge_router(self, theirs: list[Tensor], ours: list[Tensor]) -> Judged:
        """Judge a router by its experts, where scores do not tie within rounding, and weights."""
        rows = slice(0, self.chunk.tokens)
        (weights, chosen), (made, taken) = (_by_number(side, rows) for side in (theirs, ours))
        same = (chosen == taken).all(1)
        firm = torch.ones_like(same)
        for unit in (_TIED, -_TIED, 2 * _TIED, -2 * _TIED):
            with torch.device(same.device), ExactArithmetic(unit):
                moved = _listed(REFERENCE[self._op](*to_exact(self.args)))
            firm &= (moved[1][rows].sort(-1).values == chosen).all(1)
        wrong = int((firm & ~same).sum())
        if wrong:
            return f"chooses other experts for {wrong} of {len(same)} tokens", math.inf
        return self._compare(made[same], weights[same], None, None, weights.dtype)

    def _sample(self) -> Tensor | None:
        """Rows to be run in exact arithmetic: of the ends of requests and in between."""
        if self.family in (*_HOST, Family.DENSE_SELECTION):
            return None
        if not any(map(self._is_tokenwise, tree_leaves(self.args), tree_leaves(self.node.args))):
            return None
        last = self.chunk.tokens - 1
        device = self._tensors()[0].device
        if self.family in _WHOLE:
            return torch.arange(last + 1, device=device)
        count = min(_SAMPLED, last + 1)
        rows: Tensor = torch.linspace(0, last, count, device=device).long().unique()
        return rows

    def _exact(self, sample: Tensor, unit: float) -> dict[int, Tensor]:
        # Rows of padding are behind the others.
        given = self._rows(self.args, self.node.args, sample)
        if self._op in _EXPERTS:
            at = self._names().index("indices")
            used, given[at] = given[at].unique(return_inverse=True)
            weights = range(at + 1, len(given))
            kept = used >= 0
            if not bool(kept.all()):
                given[at] = given[at] - 1
            for i in weights:
                given[i] = given[i][used[kept]]
        caches = [i for i, a in enumerate(self.node.args) if self._role(a) is Role.CACHE]
        args = [
            self._format(i).exact(a) if i in caches else to_exact(a) for i, a in enumerate(given)
        ]
        with torch.device(sample.device), ExactArithmetic(unit):
            return result_numbers(_listed(REFERENCE[self._op](*args)))

    def _unit(self) -> float:
        narrow = any(
            t.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8) for t in self._tensors()
        )
        return UNIT[torch.bfloat16] if narrow else UNIT[torch.float32]

    def _rows(self, values: Sequence[Any], nodes: Sequence[Any], sample: Tensor) -> list[Any]:
        """Operands with the sampled rows alone of what has a row for every token."""
        return [
            self._rows(value, node, sample)
            if isinstance(value, list | tuple)
            else (value[sample] if self._is_tokenwise(value, node) else value)
            for value, node in zip(values, nodes, strict=True)
        ]

    def _is_tokenwise(self, value: Any, node: Any) -> bool:
        """Whether an operand has a row for every token."""
        if not isinstance(value, Tensor) or not isinstance(node, fx.Node):
            return False
        size = node.meta["val"].shape[0] if node.meta["val"].dim() else 0
        return not isinstance(size, int) and self._role(node) is not Role.CACHE

    def _role(self, node: Any) -> Role | None:
        return node.meta.get("role") if isinstance(node, fx.Node) else None

    def _format(self, number: int) -> CacheFormat:
        node: Any = self.node.args[number]
        return CacheFormat.of(node.meta["key"], self.args[number], self.spec)

    def _names(self) -> list[str]:
        return [argument.name for argument in self._op._schema.arguments]

    def _written(self) -> list[int]:
        arguments = self._op._schema.arguments
        return [
            i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
        ]

    def _tensors(self) -> list[Tensor]:
        return [value for value in tree_leaves(self.args) if isinstance(value, Tensor)]


def providers(records: Sequence[KernelRecord], tokens: int) -> list[str]:
    """Providers that may take a call of so many tokens."""
    return [k.provider for k in records if k.max_tokens is None or tokens <= k.max_tokens]


def _by_number(results: list[Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    """A router's weights fp64 and experts in the order of the experts' numbers."""
    chosen, order = results[1][rows].sort(-1)
    return results[0][rows].double().gather(1, order), chosen


def _worse(judged: Judged) -> tuple[bool, float]:
    return bool(judged[0]), judged[1]


def _cloned(args: Sequence[Any], written: Sequence[int]) -> tuple[Any, ...]:
    return tuple(a.clone() if i in written else a for i, a in enumerate(args))


def _moved(args: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return tuple(tree_map(moved, list(args)))


def _listed(results: Any) -> list[Tensor]:
    if results is None:
        return []
    return list(results) if isinstance(results, tuple | list) else [results]


def _octets(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8).flatten()
