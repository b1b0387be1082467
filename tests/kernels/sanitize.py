"""Runs our kernels on :mod:`tests.kernels.samples`, to be watched by ``compute-sanitizer``::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m tests.kernels.sanitize [TEXT ...]

With a text, only kernels whose ``op/provider`` has it. Without torch's cache of memory every tensor
is an allocation of its own, past whose end memcheck sees. docs/kernels.md has the results.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import architecture
from dsa_compile.kernels.cuda.topk import topk
from dsa_compile.kernels.facts import CallFacts, TensorFacts
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.kernels.table import KERNELS
from tests.kernels.samples import SAMPLES, Arguments

OURS = ("cuda", "triton")
Launch = tuple[str, Callable[[], Any]]

PLACES = ("slots", "slot_mapping", "block_tables", "ids", "indices", "rows")
"""Arguments whose values say where something lies; a kernel must not follow them outside."""
# One of each way to select (rows, width): see topk's choices.
TOPK_SHAPES = (
    (2, 8001), (2, 10001), (2, 16001), (140, 8001), (266, 8001), (266, 10001), (266, 16001),
    (2, 40001), (3, 70001), (9, 70001), (20, 70001), (67, 70001),
)  # fmt: skip


def facts(kernel: Implementation, arguments: Arguments) -> CallFacts:
    """A call of a kernel's op as the compiler would describe it."""
    schema = getattr(torch.ops.dsa, kernel.op).default._schema.arguments
    args = {argument.name: argument.default_value for argument in schema}
    for argument, value in zip(schema, arguments, strict=False):
        tensor = isinstance(value, Tensor)
        args[argument.name] = TensorFacts(tuple(value.shape), value.dtype) if tensor else value
    return CallFacts(kernel.op, args)


def kernels(target: str) -> list[Implementation]:
    """Ours for a target, each function once."""
    found = {k.function: k for k in KERNELS if k.provider in OURS and target in k.targets}
    return list(found.values())


def astray(kernel: Implementation, arguments: Arguments) -> Arguments | None:
    """Arguments with places outside of what they point into, or None if there are no places."""
    schema = getattr(torch.ops.dsa, kernel.op).default._schema.arguments
    changed = list(arguments)
    for number, (argument, value) in enumerate(zip(schema, arguments, strict=False)):
        if argument.name in PLACES and value is not None:
            flat = value.clone().view(-1)
            flat[::3], flat[1::5] = 1 << 30, -9
            changed[number] = flat.view(value.shape)
    moved = any(new is not old for new, old in zip(changed, arguments, strict=True))
    return tuple(changed) if moved else None


def launches(target: str, texts: Sequence[str] = ("",)) -> Iterator[Launch]:
    """Kernels of ours whose name has one of the texts, on every sample they take, also astray."""
    for kernel in kernels(target):
        if not any(text in f"{kernel.op}/{kernel.provider}" for text in texts):
            continue
        for number, arguments in enumerate(SAMPLES[kernel.op]()):
            if kernel.refusal(facts(kernel, arguments)) is None:
                name = f"{kernel.op}/{kernel.provider} {number}"
                yield name, lambda k=kernel, a=arguments: k.load()(*a)
                if (wrong := astray(kernel, arguments)) is not None:
                    yield f"{name} astray", lambda k=kernel, a=wrong: k.load()(*a)
    for rows, width in TOPK_SHAPES if any(text in "topk/cuda" for text in texts) else ():
        yield f"topk/cuda {rows}x{width}", lambda shape=(rows, width): _topk(*shape)


def _topk(rows: int, width: int) -> Tensor:
    scores = torch.randn(rows, width + 2)[:, 1:-1]
    ends = torch.randint(0, width + 1, (rows,), dtype=torch.int32)
    ends[0] = 0
    return topk(scores, ends, 2048)


def main(texts: Sequence[str]) -> None:
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    for name, launch in launches(architecture(torch.cuda.current_device()), texts or [""]):
        print(name, flush=True)
        launch()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
