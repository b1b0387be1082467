"""Which of our CUDA kernels the steps of a program launch, found without a GPU.

The host function of an op chooses kernels by shapes. So every op is called here, on tensors of the
meta device, for steps of many sizes; what it would have launched is noted down
(:mod:`dsa_compile.kernels.cuda.device`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.artifact.records import KernelRecord
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.tensor_info import TensorInfo, describe
from dsa_compile.kernels.cuda.device import rehearse
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS, OPTIONS, sample_tokens
from dsa_compile.kernels.registry import implementations
from dsa_compile.lowering.binding import Binding
from dsa_compile.ops import STREAM_OPS

# Tokens of a step: as many as CUDA graphs have rows, the limits between kernels (64, 66, 85, ...)
# from both sides, and chunks of prompts.
TOKENS = (*range(1, 33), 48, 64, *range(65, 73), 85, 96, 128, 129, 192, 256, 384, 512, 768, 1024)
PROMPT_TOKENS = (*TOKENS[1:], 1536, 2048, 3072, 4096, 6144, 8192)
# Keys that the block tables of a step hold, at most.
CONTEXTS = (2048, 8192, 16_384, 32_768, 65_536, 131_072, 163_840)
_PAGES = 4096  # of a cache; no choice depends on them


def launched_kernels(program: Program, bindings: Sequence[Binding]) -> tuple[CudaKernel, ...]:
    """Kernels of decode steps of up to 1,024 requests and of prompts in chunks of up to 8,192.

    Steps of other sizes may need more; those are compiled when they are first launched.

    Args:
        program: at the KERNEL level, for a GPU.
        bindings: of its ops.
    """
    target, limit = program.config.target, program.spec.max_position_embeddings
    kernels = {binding.op: binding.records() for binding in bindings}
    contexts = sorted({min(context, limit) for context in CONTEXTS})
    with rehearse(target) as rehearsal:
        for region in program.regions.values():
            calls = _Calls(region, kernels, target)
            for sizes in _steps(contexts, program.config.block_size):
                calls.rehearse(sizes)
        _rehearse_sampling(program.spec.vocab_size)
    return tuple(rehearsal.kernels)


def _steps(contexts: Sequence[int], block_size: int) -> Iterator[dict[str, int]]:
    """The symbols' values: tokens, requests, columns of the block table, rows of logits, pages."""
    for context in contexts:
        columns = -(-context // block_size)
        common = {"M": columns, "P": _PAGES}
        for tokens in TOKENS:
            yield {"T": tokens, "R": tokens, "R+1": tokens + 1, "N": tokens, **common}
        for tokens in PROMPT_TOKENS:
            yield {"T": tokens, "R": 1, "R+1": 2, "N": 1, **common}


class _Calls:
    """The calls of a region that launch kernels of ours, each made once for each set of shapes."""

    def __init__(
        self, region: Region, kernels: Mapping[str, tuple[KernelRecord, ...]], target: str
    ) -> None:
        self._calls: list[_Call] = []
        for node in region.graph.nodes:
            bound = kernels.get(str(node.target), ()) if node.target not in STREAM_OPS else ()
            choices = [_choice(node, record, target) for record in bound]
            if any(function is not None for _, function in choices):
                self._calls.append(_Call(node, choices))

    def rehearse(self, sizes: Mapping[str, int]) -> None:
        for call in self._calls:
            call.rehearse(sizes)


class _Call:
    """One of them; the choices are functions with the most tokens that each takes."""

    def __init__(
        self, node: fx.Node, choices: list[tuple[float, Callable[..., Any] | None]]
    ) -> None:
        self._args = node.args
        self._choices = choices
        self._infos = {arg: _info(arg) for arg in node.all_input_nodes}
        shapes = (info.shape for info in self._infos.values())
        self._symbols = sorted({size for shape in shapes for size in shape if type(size) is str})
        self._made: set[tuple[int, ...]] = set()

    def rehearse(self, sizes: Mapping[str, int]) -> None:
        key = tuple(sizes[symbol] for symbol in self._symbols)
        if key in self._made:
            return
        self._made.add(key)
        args: Any = fx.map_arg(self._args, lambda arg: _tensor(self._infos[arg], sizes))
        tokens = args[0].shape[0]
        function = next(f for limit, f in self._choices if tokens <= limit)
        if function is not None:
            function(*args)


def _choice(
    node: fx.Node, record: KernelRecord, target: str
) -> tuple[float, Callable[..., Any] | None]:
    limit = float("inf") if record.max_tokens is None else record.max_tokens
    for kernel in implementations(str(node.target).split(".")[1], target):
        if kernel.provider == record.provider and kernel.launches_cuda:
            return limit, kernel.load()
    return limit, None


def _info(node: fx.Node) -> TensorInfo:
    info = describe(node.meta["val"])
    assert isinstance(info, TensorInfo), (node, info)
    return info


def _tensor(info: TensorInfo, sizes: Mapping[str, int]) -> Tensor:
    shape = [size if isinstance(size, int) else sizes[size] for size in info.shape]
    return torch.empty(shape, dtype=info.dtype, device="meta")


def _rehearse_sampling(vocab_size: int) -> None:
    if vocab_size > MOST_TOKENS:
        return
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(1, vocab_size, dtype=dtype, device="meta")
        options = torch.empty(OPTIONS.itemsize, dtype=torch.uint8, device="meta")
        ids = torch.empty(1, dtype=torch.int64, device="meta")
        sample_tokens(logits, options, ids, ids)
