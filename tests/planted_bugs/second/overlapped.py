"""Regions with streams, run on a device that is as late as the events allow."""

from pathlib import Path
from typing import Any
from unittest import mock

TOKENS = (19, 9)
BLOCK = 16


def results_of_regions(program: Any, model_dir: Path) -> dict[str, Any]:
    """Results of each region with streams: in order on one stream, and under each policy.

    Args:
        program: at the KERNEL level.
        model_dir: for the weights.

    Returns:
        Tensors by region, ``serial`` or the policy, and result; caches are results too.
    """
    import torch

    from dsa_compile.ir.execution import compile_region
    from dsa_compile.ir.plan import MODEL
    from dsa_compile.ir.streams import has_streams
    from dsa_compile.weights.checkpoint import Checkpoint
    from tests.planted_bugs.second.stream_device import POLICIES, given, value_in
    from tests.weights.loading import load_layer

    plan = program.plans[MODEL]
    source = Checkpoint.open(model_dir, program.spec, [c.index for c in plan.layers])
    batch = step_of(program.spec.vocab_size, TOKENS)
    found: dict[str, Any] = {}
    devices: dict[tuple[str, str], tuple[Any, Any]] = {}
    for variant in program.variants[:1]:  # the long one, which has more to overlap
        values = dict(batch)
        for call in plan.calls:
            region = program.region(call.kind, variant)
            weights = load_layer(program.weights, call.kind, call.vars, source)
            inputs = [_input(node, weights, values) for node in region.inputs()]

            def copies(inputs: list[Any] = inputs) -> list[Any]:
                return [value.clone() for value in inputs]

            def kept(results: Any, arguments: list[Any], region: Any = region) -> dict[str, Any]:
                caches = {
                    node.meta["key"]: value
                    for node, value in zip(region.inputs(), arguments, strict=True)
                    if node.meta["role"] == "cache"
                }
                return dict(zip(region.outputs, results, strict=True)) | caches

            arguments = copies()
            serial = kept(compile_region(region)(*arguments), arguments)
            values |= {name: serial[name] for name in region.outputs}
            if not has_streams(region.graph):
                continue
            found[f"{call.name} {variant} serial"] = _bits(serial)
            for policy in POLICIES:
                arguments = copies()
                if (region.name, policy) not in devices:  # which the layers of a kind share
                    devices[region.name, policy] = _bound(region)
                device, forward = devices[region.name, policy]
                with mock.patch.multiple(torch.cuda, **device.patches()):
                    handles = forward(*map(given, arguments))
                    device.drain(policy)
                # the caller keeps results: copies, before their handles go
                made = [value_in(handle.cell).clone() for handle in handles]
                found[f"{call.name} {variant} {policy}"] = _bits(kept(made, arguments))
    return found


def _bits(values: dict[str, Any]) -> dict[str, Any]:
    """Values as they can be pickled, which e4m3 cannot."""
    import torch

    return {
        key: value.view(torch.uint8) if value.element_size() == 1 else value
        for key, value in values.items()
    }


def _bound(region: Any) -> tuple[Any, Any]:
    """A device, and a region on its streams."""
    from dsa_compile.ir.execution import compile_region
    from dsa_compile.ops import STREAM_OPS
    from dsa_compile.runtime.execution.streams import SideStreams, StreamSwitch
    from tests.planted_bugs.second.stream_device import Device

    device, switch = Device(), StreamSwitch(SideStreams())

    def function_of(node: Any) -> Any:
        if node.target in STREAM_OPS:
            return switch.function(node.target)
        return device.function(node)

    return device, switch.around(compile_region(region, function_of))


def _input(node: Any, weights: Any, values: Any) -> Any:
    import torch

    role, key, fake = node.meta["role"], node.meta["key"], node.meta["val"]
    if role == "weight":
        return weights[key]
    if role == "cache":
        return torch.zeros((8, *map(int, fake.shape[1:])), dtype=fake.dtype)
    return values[key]


def step_of(vocabulary: int, lengths: tuple[int, int]) -> dict[str, Any]:
    """Inputs that a plan takes of a step of two prompts, every row of which has logits."""
    import torch

    chance = torch.Generator().manual_seed(3)
    tables = torch.tensor([[5, 2], [7, -1]], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    owners = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    total = sum(lengths)
    return {
        "input_ids": torch.randint(3, vocabulary, (total,), generator=chance),
        "positions": positions,
        "slot_mapping": tables[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        "block_tables": tables,
        "cu_seqlens": torch.tensor([0, lengths[0], total], dtype=torch.int32),
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "logit_rows": torch.arange(total),
    }
