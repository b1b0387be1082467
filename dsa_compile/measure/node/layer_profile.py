"""A rank's decode step on its GPU, layer by layer and kernel by kernel."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsa_compile.measure.step.timeline import OTHER, Work, lengthening

REPLAYED = "replay_collective"
"""Text in the name of the kernel that stands for a collective."""


@dataclass(frozen=True)
class Part:
    """One kernel of a layer; microseconds.

    Attributes:
        op: the op and its module.
        kernel: its name.
        number: of the op's kernels, from 0.
        blocks: of its grid; 0 if unknown.
        start: since the layer's first kernel began.
        end: likewise.
        gap: in which nothing ran before it.
        added: by which it lengthens the step.
    """

    op: str
    kernel: str
    number: int
    blocks: int
    start: float
    end: float
    gap: float
    added: float

    @property
    def collective(self) -> bool:
        """Whether it stands for the other ranks."""
        return REPLAYED in self.kernel


@dataclass(frozen=True)
class LayerProfile:
    """One layer in a step, or the mean of several.

    Attributes:
        kind: of the layer.
        layer: its number; None for a mean.
        parts: in the order of their starts.
    """

    kind: str
    layer: int | None
    parts: tuple[Part, ...]

    @property
    def us(self) -> float:
        """Microseconds that it adds to the step, gaps included."""
        return sum(part.added + part.gap for part in self.parts)

    @property
    def gaps(self) -> float:
        """Microseconds in which nothing ran."""
        return sum(part.gap for part in self.parts)

    @property
    def collectives(self) -> float:
        """Microseconds that the kernels add which stand for collectives."""
        return sum(part.added for part in self.parts if part.collective)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        totals = {"us": self.us, "gaps": self.gaps, "collectives": self.collectives}
        parts = [asdict(part) | {"collective": part.collective} for part in self.parts]
        return {"kind": self.kind, "layer": self.layer, **totals, "parts": parts}


@dataclass(frozen=True)
class StepProfile:
    """A decode step as a CUDA graph.

    Attributes:
        label: what was run.
        gpu_ms: of the step, not traced.
        traced_ms: of the step that was traced.
        layers: in order; embedding and head among them, without numbers.
        rest_us: what everything else adds, such as the copy of the inputs.
    """

    label: str
    gpu_ms: float
    traced_ms: float
    layers: tuple[LayerProfile, ...]
    rest_us: float

    @property
    def means(self) -> tuple[LayerProfile, ...]:
        """The mean layer of each kind, in order."""
        kinds: dict[str, list[LayerProfile]] = defaultdict(list)
        for layer in self.layers:
            kinds[layer.kind].append(layer)
        return tuple(mean(found) for found in kinds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "label": self.label,
            "gpu_ms": self.gpu_ms,
            "traced_ms": self.traced_ms,
            "rest_us": self.rest_us,
            "means": [layer.to_dict() for layer in self.means],
            "layers": [layer.to_dict() for layer in self.layers],
        }


def step_profile(
    label: str,
    gpu_ms: float,
    step: Sequence[Work],
    numbers: Mapping[str, Sequence[int]],
    repeated: Mapping[str, int],
) -> StepProfile:
    """Cut a step into its layers.

    Args:
        label: of what was run.
        gpu_ms: of the step, not traced.
        step: labelled ``KIND: OP MODULE``.
        numbers: of the layers of each kind, in order; what is no layer has none.
        repeated: how often a label stands in its region, if more than once.
    """
    spans: dict[str, list[int]] = defaultdict(list)  # of each label, in time
    for span, name in sorted({(work.span, work.label) for work in step if work.label != OTHER}):
        spans[name].append(span)
    for name, times in repeated.items():  # else kernels would be shown in other layers
        assert len(spans[name]) % times == 0, f"{name} did not launch in every place"
    found: dict[tuple[str, int], list[tuple[Work, float, float]]] = defaultdict(list)
    rest = 0.0
    for work, gap, added in lengthening(step):
        if work.label == OTHER:
            rest += gap + added
            continue
        turn = spans[work.label].index(work.span) // repeated.get(work.label, 1)
        found[work.label.partition(": ")[0], turn].append((work, gap, added))
    layers = [
        LayerProfile(kind, dict(enumerate(numbers.get(kind, ()))).get(turn), _parts(parts))
        for (kind, turn), parts in found.items()
    ]
    length = max(w.end for w in step) - min(w.start for w in step) if step else 0.0
    return StepProfile(label, gpu_ms, length / 1e3, tuple(layers), rest)


def _parts(works: Sequence[tuple[Work, float, float]]) -> tuple[Part, ...]:
    began = min(work.start for work, _, _ in works)
    counts: Counter[str] = Counter()
    parts = []
    for work, gap, added in works:
        op = work.label.partition(": ")[2]
        times = work.start - began, work.end - began, gap, added
        parts.append(Part(op, work.name, counts[op], work.blocks, *times))
        counts[op] += 1
    return tuple(parts)


def mean(layers: Sequence[LayerProfile]) -> LayerProfile:
    """The mean of layers of one kind, whose parts add up to the mean of their times.

    Args:
        layers: one or more; a kernel that some of them lack counts there as nothing.
    """
    found: dict[tuple[str, str, int], list[Part]] = defaultdict(list)
    for layer in layers:
        for part in layer.parts:
            found[part.op, part.kernel, part.number].append(part)
    parts = []
    for (op, kernel, number), some in found.items():
        start, end, gap, added = (
            sum(getattr(part, name) for part in some) for name in ("start", "end", "gap", "added")
        )
        times = start / len(some), end / len(some), gap / len(layers), added / len(layers)
        parts.append(Part(op, kernel, number, some[0].blocks, *times))
    parts.sort(key=lambda part: part.start)
    return LayerProfile(layers[0].kind, None, tuple(parts))
