"""How a canonical parameter is stored: in one tensor, or one matrix an expert."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Part:
    """One stored tensor of a parameter, and where it goes.

    Args:
        key: its name in the checkpoint.
        shape: the shape it must have.
        expert: index into the parameter's first dimension, or None for the whole parameter.
        row: first row within the expert's matrix.
    """

    key: str
    shape: tuple[int, ...]
    expert: int | None = None
    row: int = 0

    @property
    def scale_key(self) -> str:
        """The name of its block scales, if it is quantised."""
        return self.key + SCALE_SUFFIX


def stored_parts(name: str, shape: tuple[int, ...], present: Container[str]) -> tuple[Part, ...]:
    """List the stored tensors that make up parameter ``name``.

    Fused experts are stored as such only if ``present`` has their name; both ``save_pretrained``
    and the published checkpoints store one matrix an expert and projection.
    """
    if ".mlp.experts." not in name or name in present:
        return (Part(name, shape),)
    return tuple(_expert_parts(name, shape))


def _expert_parts(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    prefix, _, leaf = name.rpartition(".")
    experts, rows, columns = shape
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    height = rows // len(projections)
    for expert in range(experts):
        for number, projection in enumerate(projections):
            key = f"{prefix}.{expert}.{projection}.weight"
            yield Part(key, (height, columns), expert, number * height)
