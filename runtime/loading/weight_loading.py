"""The weights of a runnable artifact: read before anything else, or while other work goes on."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.artifact.reader import Artifact
from dsa_compile.ir.plan import Call
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.dummy import DummyWeights
from dsa_compile.weights.materialize import WeightSource
from dsa_compile.weights.pack import PackedFile, PackedWeights
from dsa_compile.weights.plan import WeightEntry, WeightPlan
from dsa_compile.weights.ranks import file_stem, plan_at_rank
from dsa_compile.weights.sharing import Home, weight_homes

Weights = Mapping[str, Mapping[str, Tensor]]
"""Weights by key, for every call of a plan, by its name."""


def load_weights(
    artifact: Artifact, model_dir: Path | None, load_format: str = "auto", rank: int = 0
) -> Weights:
    """The weights of a runnable artifact.

    Args:
        artifact: runnable in the format, see
            :func:`~dsa_compile.runtime.loading.load_runner.require_runnable`.
        model_dir: as for :func:`~dsa_compile.runtime.loading.load_runner.load_runner`.
        load_format: likewise.
        rank: of a layout of several, whose part to load.

    Raises:
        ArtifactError: the weights are missing or not the ones compiled, or this machine is not the
            target.
        CheckpointError: the model's files do not hold what the artifact needs.
    """
    device = device_of(artifact.manifest.target)
    source = DummyWeights() if load_format == "dummy" else _source(artifact, model_dir)

    def make(stem: str, call: Call, key: str, entry: WeightEntry) -> Tensor:
        made = torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)
        source.fill(stem, key, entry, call.vars, made)
        return made

    return _weights(artifact, rank, make)


def _weights(
    artifact: Artifact, rank: int, make: Callable[[str, Call, str, WeightEntry], Tensor]
) -> Weights:
    """A rank's weights, each made at its home: of the stem of its packed file, if it has one, its
    call, its key, and how it is made."""
    manifest = artifact.manifest
    calls, numbers = manifest.calls, manifest.compile.layout.numbers(rank)
    plan = _plan(artifact)
    of_rank = plan_at_rank(plan, numbers)
    packed = manifest.weights.mode == "pack"
    made: dict[Home, Tensor] = {}
    homes = weight_homes(calls, plan)
    for call in calls:
        of_all = plan.entries(call.kind)
        for key, entry in of_rank.entries(call.kind).items():
            if (home := homes[call.name][key]) not in made:
                stem = file_stem(call.name, of_all[key].expr, numbers) if packed else call.name
                made[home] = make(stem, call, key, entry)
    return {name: {key: made[home] for key, home in own.items()} for name, own in homes.items()}


class WeightLoad:
    """Weights that are there, or will be once :meth:`finish` returns.

    Packed weights reach a GPU while the caller measures steps and captures graphs, for which the
    weights' addresses are enough: until then they are zeros. All other weights are loaded at once.

    Args:
        artifact: as for :func:`load_weights`.
        model_dir: likewise.
        load_format: likewise.
        rank: likewise.

    Attributes:
        weights: their final memory.
        later: whether they are still being read.

    Raises:
        ArtifactError: as :func:`load_weights`.
        CheckpointError: likewise.
    """

    def __init__(
        self, artifact: Artifact, model_dir: Path | None, load_format: str, rank: int = 0
    ) -> None:
        packed = artifact.manifest.weights.mode == "pack" and load_format == "auto"
        device = device_of(artifact.manifest.target)
        self.later = packed and device.type == "cuda"
        self._stopped = False
        self._error: BaseException | None = None
        if not self.later:
            self.weights = load_weights(artifact, model_dir, load_format, rank)
            return
        source = _source(artifact, model_dir)
        to_fill: list[tuple[str, Call, str, WeightEntry, Tensor]] = []

        def make(stem: str, call: Call, key: str, entry: WeightEntry) -> Tensor:
            made = torch.zeros(entry.shape, dtype=entry.torch_dtype, device=device)
            to_fill.append((stem, call, key, entry, made))
            return made

        self.weights = _weights(artifact, rank, make)
        torch.cuda.synchronize(device)  # zeros must not come after weights

        def fill() -> None:
            try:
                # not the legacy stream, which would wait for what the caller launches
                with torch.cuda.stream(torch.cuda.Stream(device)):
                    for stem, call, key, entry, out in to_fill:
                        if self._stopped:
                            return
                        source.fill(stem, key, entry, call.vars, out)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=fill, name="weights", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        made = {id(tensor): tensor for call in self.weights.values() for tensor in call.values()}
        return sum(tensor.nbytes for tensor in made.values())

    def finish(self) -> None:
        """Wait for the weights.

        Raises:
            ArtifactError: as :func:`load_weights`.
        """
        if self.later:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop reading."""
        self._stopped = True
        if self.later:
            self._thread.join()


def _plan(artifact: Artifact) -> WeightPlan:
    path = artifact.manifest.weights.plan
    assert path is not None, "see require_runnable"
    return WeightPlan.from_json(artifact.read_json(path))


def _source(artifact: Artifact, model_dir: Path | None) -> WeightSource:
    manifest = artifact.manifest
    if manifest.weights.mode == "pack":
        files = [PackedFile(f.name, f.size, f.sha256) for f in manifest.weights.files]
        # the artifact's own check has hashed them already, as thoroughly as was asked for
        return PackedWeights.open(artifact.path / "weights", files, verify="header")
    folder = artifact.model_dir(model_dir)
    return Checkpoint.open(folder, manifest.model.spec, manifest.stored_layers)
