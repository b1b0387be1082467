"""Faults of the reference implementations of collectives and of ops that know a rank's experts."""

from tests.planted_bugs.second.fault import Fault

TP2 = (("tp", 2),)
DP2_EP2 = (("dp", 2), ("ep", 2))

_FUSED = "return add_rms_norm_quantize(all_reduce(x, axis, ranks), residual, weight, eps, ue8m0)"

FAULTS = (
    Fault(
        id="columns-by-turns",
        about="columns of ranks are laid out by turns, the first of each, then the second of each",
        file="dsa_compile/ops/collectives.py",
        old="return torch.cat(list(parts), -1)",
        new="return torch.stack(list(parts), -1).flatten(-2)",
        kind="kernel",
        culprit="all_gather",
        recipe="bf16",
        model="trained",
        options=(("tp", 2), ("ep", 2), ("shard_embedding", True)),
    ),
    Fault(
        id="columns-as-they-lie",
        about="gathered columns are viewed as they lie, rank by rank: right for one row alone",
        file="dsa_compile/ops/collectives.py",
        old="return columns_of_ranks(communicator_of(axis, ranks).gather(x, axis, ranks).unbind())",
        new=(
            "every = communicator_of(axis, ranks).gather(x, axis, ranks)\n"
            "    return every.reshape(*x.shape[:-1], -1)"
        ),
        kind="kernel",
        culprit="all_gather",
        options=TP2,
    ),
    Fault(
        id="tokens-of-lanes-by-turns",
        about="tokens of lanes are laid out by turns, and sums are handed out lane by lane",
        file="dsa_compile/ops/collectives.py",
        old=(
            "        part.flatten(0, 1) for part in"
            " communicator_of(axis, ranks).gather_many(xs, axis, ranks)\n"
        ),
        new=(
            "        part.transpose(0, 1).flatten(0, 1)\n"
            "        for part in communicator_of(axis, ranks).gather_many(xs, axis, ranks)\n"
        ),
        kind="kernel",
        culprit="all_gather_many",
        recipe="bf16",
        options=(("dp", 2),),
    ),
    Fault(
        id="stream-summed-over-ranks",
        about="every rank adds the stream before the sum over ranks",
        file="dsa_compile/ops/collectives.py",
        old=_FUSED,
        new=(
            "total = all_reduce(x + residual, axis, ranks)\n"
            "    return add_rms_norm_quantize(total, torch.zeros_like(total), weight, eps, ue8m0)"
        ),
        kind="kernel",
        culprit="all_reduce_add_rms_norm_quantize",
        recipe="fp8-kv-tensor",
        model="broad",
        options=TP2,
    ),
    Fault(
        id="stream-of-one-rank",
        about="the stream behind the norm has the own rank's part of the sum",
        file="dsa_compile/ops/collectives.py",
        old=_FUSED,
        new=(
            "total = all_reduce(x, axis, ranks)\n"
            "    found = add_rms_norm_quantize(total, residual, weight, eps, ue8m0)\n"
            "    return (*found[:3], residual + x)"
        ),
        kind="kernel",
        culprit="all_reduce_add_rms_norm_quantize",
        recipe="fp8",
        model="broad-fp8",
        options=TP2,
    ),
    Fault(
        id="first-expert-is-absent",
        about="a rank's first expert, whose number is 0, counts as one that another rank has",
        file="dsa_compile/ops/moe.py",
        old="return places[indices.clamp(min=0)].masked_fill(indices < 0, -1)",
        new=(
            "found = places[indices.clamp(min=0)]\n"
            "    return found.masked_fill((indices < 0) | (found <= 0), -1)"
        ),
        kind="kernel",
        culprit="place_experts",
        options=(("tp", 2), ("ep", 2)),
    ),
    Fault(
        id="control-sum-rounded-once",
        about="sums over ranks are made in fp32 and rounded once",
        file="dsa_compile/ops/collectives.py",
        old=(
            "    total = parts[0].clone(memory_format=torch.contiguous_format)\n"
            "    for part in parts[1:]:\n"
            "        total = total + part\n"
            "    return total\n"
        ),
        new=(
            "    total = parts[0].to(torch.float32, copy=True)\n"
            "    for part in parts[1:]:\n"
            "        total += part\n"
            "    return total.to(parts[0].dtype).contiguous()\n"
        ),
        kind="kernel",
        culprit="",
        recipe="bf16",
        model="trained",
        control=True,
        options=(("tp", 2), ("dp", 2)),
    ),
)
