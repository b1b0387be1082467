"""The compiler's loader, checked key by key against loaders that share no code with it.

Every other comparison with transformers takes the weights for granted: a loader that exchanged
gate and up would look like a wrong graph. :func:`compare_loaders` accuses the tensor.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.reference_model import load_reference, parameter_shapes
from dsa_compile.measure.eval.stored_weights import StoredWeights
from dsa_compile.weights.block_fp8 import BLOCK, scale_shape
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.plan import Constant, WeightPlan

WHOLE_MODEL_BYTES = 2 << 30
"""Bound on an fp32 model that transformers loads whole, to compare with."""

Tensors = Callable[[str], Tensor]


@dataclass(frozen=True)
class Difference:
    """A parameter or constant that the compiler does not have as the reference has it.

    Attributes:
        name: of the parameter, as in transformers' ``state_dict``.
        problem: what differs, and where first; names the part of an expert.
        against: which loader it was compared with.
        computed: whether it is a constant, which the export computes and no checkpoint has.
    """

    name: str
    problem: str
    against: str
    computed: bool = False

    @property
    def error_phrase(self) -> str:
        """Error of the compiler, as the end of a sentence about a parameter."""
        return "is computed differently by the export" if self.computed else "is read differently"

    def __str__(self) -> str:
        return f"{self.name}: {self.problem} (against {self.against})"


def compare_loaders(
    model_dir: Path, spec: ModelSpec, layers: Sequence[int] | None = None
) -> list[Difference]:
    """Read every parameter with the compiler's loader and with another one.

    Names and shapes are those of transformers' model. Values are compared to the last bit, for
    neither side does more than convert to fp32 or multiply by a scale: with those that transformers
    loads if the checkpoint is unquantised and small, else with the stored tensors read by
    safetensors and dequantised here, one parameter at a time. The FP8 values and scales of a
    quantised parameter, which the ``fp8`` recipes take, are compared as well.

    Args:
        model_dir: config.json and weights.
        spec: the model's geometry.
        layers: the decoder layers to read; None for all.

    Returns:
        The parameters that differ, in the model's order; empty if the loader is right.

    Raises:
        UserError: transformers is not installed or refuses the model, or the checkpoint is broken.
    """
    chosen = range(spec.num_hidden_layers) if layers is None else layers
    checkpoint = Checkpoint.open(model_dir, spec, chosen)
    shapes = parameter_shapes(model_dir)
    against, reference = _reference(model_dir, spec, shapes.values())
    taken_as_blocks = spec.quantization is not None and spec.quantization.block == (BLOCK, BLOCK)
    found = []
    for name in (name for name in shapes if _is_wanted(name, chosen)):
        problem = next(_problems(name, shapes[name], checkpoint, reference, taken_as_blocks), None)
        if problem is not None:
            found.append(Difference(name, problem, against))
    return found


def compare_constants(model_dir: Path, spec: ModelSpec, plan: WeightPlan) -> list[Difference]:
    """Compare the constants of a weight plan with the buffers of transformers' model.

    Args:
        model_dir: config.json and weights.
        spec: the model's geometry.
        plan: of the exported program; its constants have the names of modules and buffers.

    Returns:
        The constants that differ, in the plan's order.

    Raises:
        UserError: as :func:`compare_loaders`.
    """
    buffers = dict(load_reference(model_dir, spec).named_buffers())
    constants = {
        key: entry.expr
        for kind in plan.kinds()
        for key, entry in plan.entries(kind).items()
        if isinstance(entry.expr, Constant)
    }
    found = []
    for key, expr in constants.items():
        want = next((b for name, b in buffers.items() if name.endswith(f".{key}")), None)
        got = torch.tensor(expr.values).view(expr.shape)
        if want is None:
            problem = "no buffer of transformers' model"
        elif got.shape != want.shape:
            problem = f"{list(got.shape)} here, {list(want.shape)} there"
        elif _unlike(got, want.float()).any():
            problem = _where(key, got, want.float())
        else:
            continue
        found.append(Difference(key, problem, "transformers", computed=True))
    return found


def misread_weights(
    model_dir: Path, spec: ModelSpec, layers: Sequence[int], plan: WeightPlan
) -> Iterator[Difference]:
    """Parameters, then constants, that differ in transformers: see :func:`compare_loaders` and
    :func:`compare_constants`."""
    yield from compare_loaders(model_dir, spec, layers)
    yield from compare_constants(model_dir, spec, plan)


def _is_wanted(name: str, layers: Sequence[int]) -> bool:
    parts = name.split(".")
    return parts[:2] != ["model", "layers"] or int(parts[2]) in layers


def _reference(
    model_dir: Path, spec: ModelSpec, shapes: Iterable[tuple[int, ...]]
) -> tuple[str, Tensors]:
    block = spec.quantization.block if spec.quantization else None
    if block is None and 4 * sum(map(math.prod, shapes)) <= WHOLE_MODEL_BYTES:
        return "transformers", load_reference(model_dir, spec).state_dict().__getitem__
    stored = StoredWeights(model_dir, block)
    return stored.name, stored.tensor


def _problems(
    name: str,
    shape: tuple[int, ...],
    checkpoint: Checkpoint,
    reference: Tensors,
    taken_as_blocks: bool,
) -> Iterator[str]:
    try:
        ours = checkpoint.shape(name)
    except CheckpointError:
        yield "the loader has no parameter of this name"
        return
    want = reference(name)
    if not ours == shape == tuple(want.shape):
        yield f"{list(ours)} here, {list(want.shape)} there, {list(shape)} in transformers' model"
        return
    got = torch.empty(shape)
    checkpoint.read_into(name, got)
    if _unlike(got, want).any():
        yield _where(name, got, want)
    elif checkpoint.stored_dtype(name) is torch.float8_e4m3fn and taken_as_blocks:
        got = _dequantised(name, shape, checkpoint)
        if _unlike(got, want).any():
            yield "as FP8 blocks, " + _where(name, got, want)


def _dequantised(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> Tensor:
    """Values in fp32 that the FP8 values and scales of a recipe stand for."""
    stacked = 2 if name.endswith(".gate_up_proj") else 1
    values = torch.empty(shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scale_shape(shape, stacked))
    checkpoint.read_quantized(name, stacked, values, scales)
    height = shape[-2] // stacked
    row = torch.arange(height) // BLOCK
    row = torch.cat([row + number * -(-height // BLOCK) for number in range(stacked)])
    column = torch.arange(shape[-1]) // BLOCK
    return values.float() * scales[..., row, :][..., column]


def _unlike(got: Tensor, want: Tensor) -> Tensor:
    """Mask of the elements at which the bits of two fp32 tensors differ."""
    return got.view(torch.int32) != want.contiguous().view(torch.int32)


def _where(name: str, got: Tensor, want: Tensor) -> str:
    unlike = _unlike(got, want).nonzero()
    first = [int(index) for index in unlike[0]]
    text = f"{len(unlike)} of {got.numel()} values differ, first {first}"
    if not name.endswith(".gate_up_proj"):
        return text
    half = got.shape[1] // 2
    text += f" (expert {first[0]}, {'gate' if first[1] < half else 'up'})"
    exchanged = not _unlike(torch.cat((got[:, half:], got[:, :half]), 1), want).any()
    return text + ("; gate and up are exchanged" if exchanged else "")
