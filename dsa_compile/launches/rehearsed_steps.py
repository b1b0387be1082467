"""All kernels of ours that the steps of a program launch, found without launching any.

The host function of an op chooses kernels by shapes. So every op is called here, on tensors of the
meta device, for steps of many sizes; what it would have launched is noted down
(:mod:`dsa_compile.kernels.cuda.device`). Kernels of other libraries are not found.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from dsa_compile.artifact.records import KernelRecord
from dsa_compile.ir.region import Region
from dsa_compile.kernels.cuda import draft_rows
from dsa_compile.kernels.cuda.device import Rehearsal, rehearse
from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS, OPTIONS, sample_tokens
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.kernels.registry import implementations
from dsa_compile.launches.call import Call, Choice, form_of

Kernels = Mapping[str, tuple[KernelRecord, ...]]


@dataclass(frozen=True)
class BoundGraphs:
    """Graphs of the KERNEL level and what implements their ops.

    Attributes:
        regions: the graphs.
        kernels: providers of each op, by the op's full name.
        target: ``"sm_90a"`` or ``"sm_100a"``.
        vocab_size: of the logits that tokens are sampled from.
        drafts: whether steps may make drafts of their own.
    """

    regions: tuple[Region, ...]
    kernels: Kernels
    target: str
    vocab_size: int
    drafts: bool

    def calls(
        self, wanted: Callable[[Implementation], bool], device: str = "meta"
    ) -> Iterator[Call]:
        """The calls that some wanted implementation is bound to, one of those that are alike.

        Args:
            wanted: others are not called.
            device: of the tensors that calls are made on.
        """
        seen = set()
        for region in self.regions:
            for node in region.graph.nodes:
                bound = self.kernels.get(str(node.target), ())
                if not bound or (form := form_of(node)) in seen:
                    continue
                seen.add(form)
                choices = [_choice(node, record, self.target, wanted) for record in bound]
                if any(function is not None for _, function in choices):
                    yield Call(node, choices, device)


def rehearse_steps(
    graphs: BoundGraphs,
    steps: Iterable[Mapping[str, int]],
    wanted: Callable[[Implementation], bool],
    processors: int | None = None,
    also: Iterable[Callable[[], object]] = (),
) -> Rehearsal:
    """Call everything that launches kernels of ours, and note which.

    Args:
        graphs: what steps run.
        steps: values of the symbols, see :func:`~dsa_compile.launches.step_sizes.step_sizes`.
        wanted: which implementations to call.
        processors: multiprocessors of the device; None for the target's usual.
        also: functions that launch what steps launch beside the graphs; sampling and the rows of
            drafts are included.
    """
    steps = tuple(steps)
    with rehearse(graphs.target, processors) as rehearsal:
        for call in graphs.calls(wanted):
            for sizes in steps:
                call.make(sizes)
        _rehearse_sampling(graphs.vocab_size)
        if graphs.drafts:
            draft_rows.launch_each()
        for function in also:
            function()
    return rehearsal


def _choice(
    node: fx.Node,
    record: KernelRecord,
    target: str,
    wanted: Callable[[Implementation], bool],
) -> Choice:
    limit = float("inf") if record.max_tokens is None else record.max_tokens
    for kernel in implementations(str(node.target).split(".")[1], target):
        # one provider may be listed twice, with and without a limit: the function is the same
        if kernel.provider == record.provider and kernel.function and wanted(kernel):
            return limit, kernel.load()
    return limit, None


def _rehearse_sampling(vocab_size: int) -> None:
    """Logits are the model's after a prompt, and fp32 after a captured decode step."""
    if vocab_size > MOST_TOKENS:
        return
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(1, vocab_size, dtype=dtype, device="meta")
        options = torch.empty(OPTIONS.itemsize, dtype=torch.uint8, device="meta")
        ids = torch.empty(1, dtype=torch.int64, device="meta")
        sample_tokens(logits, options, ids, ids)
