"""One decoder layer of the released widths, with random weights stored in FP8 blocks.

The same stored weights go into every recipe: recipe fp32 dequantises them and is the reference.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV32Config

from dsa_compile.artifact.reader import Artifact
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.plan import MODEL
from dsa_compile.ir.region import Region, Role
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.ops.quantize import E4M3
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.execution.executor import bind
from dsa_compile.weights.block_fp8 import BLOCK
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.materialize import materialize
from dsa_compile.weights.plan import WeightEntry, WeightPlan
from dsa_compile.weights.windows import Window
from examples.small_models.models import yarn_parameters
from tests.weights.loading import load_layer

VOCABULARY = 1024
PAGE = 64
STREAM = 2.0
"""Deviation of the residual stream into the layer, which adds about as much as its weights' 1."""
LAYER = {"dense": 0, "moe": 3}
"""A layer of each kind in the released model."""
_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}
_UNQUANTISED = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj")
_NAN = 127  # and 255
_POOL = (1 << 24) + 43  # bytes that all values are taken from, at places that depend on the name
_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).float().nan_to_num(448.0)
_DEVIATION = _VALUES.square().mean().sqrt().item()


class StoredBlocks:
    """A checkpoint whose parameters are made from their names whenever they are read.

    Args:
        spec: for their shapes.
        layers: that it holds.
        device: where values in blocks are made; they are the same on every device.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[int], device: torch.device) -> None:
        self._parameters = canonical_parameters(spec, layers)
        self._device = device
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(0, 256, (_POOL,), dtype=torch.uint8, generator=generator)
        bits = torch.where(bits % 128 == _NAN, bits - 1, bits)
        # once more behind itself: it is read from any place on
        self._pool = bits.repeat(2).to(device).view(E4M3)
        self._wide = self._pool.float()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parameters[name].shape

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        shape = self.shape(name)
        if window:
            whole = torch.empty(shape, dtype=out.dtype, device=out.device)
            self.read_into(name, whole)
            out.copy_(whole[window])
            return
        if len(shape) == 1 or any(part in name for part in _UNQUANTISED):
            out.copy_(self._plain(name, shape))
            return
        for index, matrix in enumerate(out if len(shape) == 3 else [out]):
            scales = self._scales(name, index, shape[-2:]).repeat_interleave(BLOCK, 1)
            parts = self._values(self._wide, name, index, shape[-2:])
            for rows, values, scale in zip(matrix.split(BLOCK), parts, scales, strict=True):
                rows.copy_(values * scale[: shape[-1]])

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        assert not window, "one rank reads all"
        shape = self.shape(name)
        assert shape[-2] % (stacked * BLOCK) == 0 or stacked == 1
        many = len(shape) == 3
        for index in range(shape[0] if many else 1):
            if values is not None:
                parts = self._values(self._pool, name, index, shape[-2:])
                matrix = values[index] if many else values
                for rows, part in zip(matrix.split(BLOCK), parts, strict=True):
                    rows.copy_(part)
            if scales is not None:
                out = scales[index] if many else scales
                out.copy_(self._scales(name, index, shape[-2:]))

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        materialize(entry, variables, self, out)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = self._generator(name)
        made = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            made = made.mul_(0.1).add_(1.0)
        elif len(shape) == 1:
            made = made.mul_(0.05)
        else:
            made = made.mul_(STREAM if "embed_tokens" in name else shape[-1] ** -0.5)
        return made if name.endswith("correction_bias") else made.bfloat16()

    def _values(
        self, pool: Tensor, name: str, index: int, shape: tuple[int, ...]
    ) -> Iterator[Tensor]:
        """The rows of each row of blocks."""
        start = zlib.crc32(f"{name} {index}".encode())
        for first in range(0, shape[0], BLOCK):
            rows = min(BLOCK, shape[0] - first)
            begin = (start + first * shape[1]) % _POOL
            yield pool[begin : begin + rows * shape[1]].view(rows, shape[1])

    def _scales(self, name: str, index: int, shape: tuple[int, ...]) -> Tensor:
        """For each block of 128×128; products keep the variance of what they take."""
        grid = [-(-size // BLOCK) for size in shape]
        scales = torch.rand(grid, generator=self._generator(f"{name} {index}"))
        scales = scales.mul_(0.5).add_(0.75).div_(_DEVIATION * shape[-1] ** 0.5)
        return scales.to(self._device)


def compiled(folder: Path, kind: str, recipe: str, target: str, **geometry: Any) -> Path:
    """Embedding, one layer and the head as an artifact below ``folder``."""
    hf = DeepseekV32Config(
        rope_parameters=yarn_parameters(),
        max_position_embeddings=163840,
        vocab_size=VOCABULARY,
        quantization_config=_QUANTIZATION,
        **geometry,
    )
    hf.save_pretrained(folder / "model")
    out = folder / f"{kind}-{recipe}-{target}"
    layers = (LAYER[kind], LAYER[kind])
    options = {"recipe": recipe, "target": target, "layers": layers}
    # they go with what few steps a test makes
    compile_model(folder / "model", out, weights="none", compiled_kernels=False, **options)
    return out


def batch(lengths: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """The tensors of a step.

    Args:
        lengths: new tokens and context, these included, of each request.
    """
    width = max(-(-context // PAGE) for _, context in lengths) + 1
    tables = torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
    tables = tables.flip(0)  # not in the order of requests
    positions = [torch.arange(context - new, context) for new, context in lengths]
    slots = [
        row[p // PAGE].long() * PAGE + p % PAGE for row, p in zip(tables, positions, strict=True)
    ]
    count = sum(new for new, _ in lengths)
    generator = torch.Generator().manual_seed(count)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (count,), generator=generator),
        "positions": torch.cat(positions),
        "slot_mapping": torch.cat(slots),
        "block_tables": tables,
        "cu_seqlens": starts.int(),
        "context_lens": torch.tensor([context for _, context in lengths], dtype=torch.int32),
        "logit_rows": starts[1:] - 1,
    }


class Layer:
    """An artifact of one layer with weights and caches.

    Args:
        path: from :func:`compiled`.
        pages: of the caches.
    """

    def __init__(self, path: Path, pages: int) -> None:
        artifact = Artifact.open(path)
        self._manifest = manifest = artifact.manifest
        self._device = device_of(manifest.target)
        self._regions = {record.name: artifact.region(record.name) for record in manifest.regions}
        self._calls = manifest.plans[MODEL].writing  # not the head
        plan = WeightPlan.from_json(artifact.read_json(manifest.weights.plan))
        layers = [entry.index for entry in manifest.layers]
        source = StoredBlocks(manifest.model.spec, layers, self._device)
        self._weights = [
            load_layer(plan, call.kind, call.vars, source, device=self._device)
            for call in self._calls
        ]
        self._caches = {
            cache.key: torch.zeros(
                (pages, PAGE, cache.width), dtype=getattr(torch, cache.dtype), device=self._device
            )
            for (caches,) in [set(manifest.caches.values())]
            for cache in caches
        }

    @torch.inference_mode()
    def __call__(self, variant: str, lengths: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The residual stream into and out of the layer, fp32 ``[T, H]``; see :func:`batch`."""
        values = {key: tensor.to(self._device) for key, tensor in batch(lengths).items()}
        streams = []
        for call, weights in zip(self._calls, self._weights, strict=True):
            name = f"{call.kind}.{variant}"
            region = self._regions.get(name) or self._regions[call.kind]
            self._bound(region, weights).run(values)
            streams.append(values["hidden"].float())
        return streams[0], streams[1]

    def _bound(self, region: Region, weights: Mapping[str, Tensor]) -> BoundCall:
        function = bind(region, self._manifest.kernels, self._manifest.target)
        return BoundCall(region, function, {Role.WEIGHT: weights, Role.CACHE: self._caches})


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Cosine of two tensors as vectors."""
    a, b = ours.double().flatten(), theirs.double().flatten()
    return (torch.dot(a, b) / (a.norm() * b.norm())).item()
