"""A compiled model with random weights and full caches, some of its layers at a time."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.writer import ArtifactWriter
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.emit import emit
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.weights.dummy import DummyWeights
from dsa_compile.weights.plan import WeightEntry, WeightPlan

Weights = Mapping[str, Mapping[str, Tensor]]


@dataclass
class Compiled:
    """One compilation.

    Attributes:
        manifest: of its artifact.
        regions: its graphs by name.
        plan: of its weights.
    """

    manifest: Manifest
    regions: Mapping[str, Region]
    plan: WeightPlan


class Compiler:
    """Compiles one model with different options; the reference is exported once.

    Args:
        model_dir: with a ``config.json``; weights are not read.
        config: the options that all compilations share.
    """

    def __init__(self, model_dir: Path, config: CompileConfig) -> None:
        self._model_dir = model_dir
        self._config = config
        self._exported: Program = build_program(model_dir, config)

    def compile(self, disable: Sequence[str] = ()) -> Compiled:
        """Compile without some passes.

        Raises:
            UserError: a pass cannot be left out.
        """
        config = replace(self._config, disable=(*self._config.disable, *disable))
        program = self._exported.fork(config)
        run_pipeline(program)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "artifact"
            with ArtifactWriter(path) as writer:
                emit(program, writer, self._model_dir, None, bind_kernels(program))
            return read(path)


def read(path: Path) -> Compiled:
    """Manifest, graphs and weight plan of an artifact on disk, without its weights."""
    artifact = Artifact.open(path, "header")
    manifest = artifact.manifest
    if manifest.weights.plan is None:
        raise UserError(f"{path}: it has no weight plan; recompile")
    regions = {record.name: artifact.region(record.name) for record in manifest.regions}
    plan = WeightPlan.from_json(artifact.read_json(manifest.weights.plan))
    return Compiled(manifest, regions, plan)


class WeightPool:
    """Random weights on the GPU, made once for all compilations that take them in one form."""

    def __init__(self, seed: int = 0) -> None:
        self._source = DummyWeights(seed)
        self._made: dict[tuple[str, str, str, tuple[int, ...]], Tensor] = {}

    def weights(self, compiled: Compiled, *, keep: bool = True) -> Weights:
        """Weights of every call, by its name.

        Args:
            compiled: for the layers and the plan.
            keep: hold on to those made now, for others to share.
        """
        return {
            call.name: {
                key: self._get(call.name, key, entry, call.vars, keep)
                for key, entry in compiled.plan.entries(call.kind).items()
            }
            for call in compiled.manifest.calls
        }

    def _get(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], keep: bool
    ) -> Tensor:
        place = (stem, key, entry.dtype, entry.shape)
        found = self._made.get(place)
        if found is None:
            found = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cuda")
            self._source.fill(stem, key, entry, variables, found)
            if keep:
                self._made[place] = found
        return found


def filled_runner(compiled: Compiled, weights: Weights, num_blocks: int) -> ModelRunner:
    """A runner whose caches are full of what a model might have written."""
    runner = ModelRunner(compiled.manifest, compiled.regions, weights, num_blocks)
    fill_caches(runner)
    return runner


def fill_caches(runner: ModelRunner, pages: int | None = None) -> None:
    """Fill a runner's caches with random rows, as a model might have written them.

    Args:
        runner: between steps.
        pages: so many from the first; None for all.
    """
    generator = torch.Generator(runner.device)
    generator.manual_seed(1)
    for caches in runner.caches.values():
        for key, cache in caches.items():
            _fill(key, cache[:pages], runner.block_size, generator)


_CHUNK = 1 << 12  # pages filled at a time
_NARROW = 260  # bytes of a latent row with fewer values than share a scale: a small model's


def _fill(key: str, cache: Tensor, block_size: int, generator: torch.Generator) -> None:
    """Random rows in a cache's format, known by its dtype and width.

    Bytes are rows of e4m3, fp32 scales and bf16 (latent), or pages of e4m3 and scales (index).
    """
    for start in range(0, cache.shape[0], _CHUNK):
        part = cache[start : start + _CHUNK]
        if cache.dtype is not torch.uint8:
            part.copy_(torch.randn(part.shape, device=cache.device, generator=generator))
        elif key == "index_cache":
            pages = part.view(len(part), -1)
            keys = block_size * (cache.shape[2] - 4)
            pages[:, :keys] = _e4m3(len(part), keys, generator)
            pages[:, keys:] = _scales(len(part), block_size, part.device)
        elif cache.shape[2] < _NARROW:
            part.zero_()
        elif cache.shape[2] % 64:
            rows = part.view(-1, cache.shape[2])
            rank = (cache.shape[2] - 128) * 128 // 132  # 128 values and a scale each, 64 of bf16
            scales = rank // 32
            rows[:, :rank] = _e4m3(len(rows), rank, generator)
            rows[:, rank : rank + scales] = _scales(len(rows), rank // 128, rows.device)
            rope = torch.randn(len(rows), 64, device=cache.device, generator=generator)
            rows[:, rank + scales :] = rope.bfloat16().view(torch.uint8)
        else:
            part.view(-1, cache.shape[2]).copy_(
                _e4m3(part.shape[0] * part.shape[1], cache.shape[2], generator)
            )


def _e4m3(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(rows, columns, device=generator.device, generator=generator)
    return (values * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _scales(rows: int, count: int, device: torch.device) -> Tensor:
    return torch.full((rows, count), 2.0**-7, device=device).view(torch.uint8)
