"""Every implementation of every kernel op, in order of preference.

The order is what was measured (``docs/kernels.md``), not habit. ``dsa-compile --explain-kernels``
prints what this table gave for a model and why the others were left.
"""

from collections.abc import Callable
from typing import Any

import torch

from dsa_compile.kernels.facts import Condition, size_in, size_multiple, value_at_most, value_multiple
from dsa_compile.kernels.implementation import GPUS, Implementation
from dsa_compile.ops import REFERENCE

_TRITON = "dsa_compile.kernels.triton"
_CUDA = "dsa_compile.kernels.cuda"
_PEERS = "dsa_compile.kernels.peers"

_BF16 = torch.bfloat16
_HALF = (torch.bfloat16, torch.float16)
# the published geometry of the latent cache and of the indexer
_LATENT = (size_in("q_latent", 2, 512), size_in("q_pe", 2, 64))
_INDEXER = (size_in("q", 2, 128), size_in("cache", 1, 16, 32, 64))


def _triton(op: str, module: str, *conditions: Condition, note: str = "") -> Implementation:
    function = f"{_TRITON}.{module}:{op}"
    return Implementation(op, "triton", function, GPUS, conditions, note=note)


KERNELS: tuple[Implementation, ...] = (
    # norms, activations, quantisation
    _triton("rms_norm", "norm"),
    _triton("add_rms_norm", "norm"),
    _triton("layer_norm", "norm"),
    _triton("rms_norm_quantize", "norm_quantize", size_multiple("x", 1, 128)),
    _triton("rms_norm_quantize_keep", "norm_quantize", size_multiple("x", 1, 128)),
    _triton("add_rms_norm_quantize", "norm_quantize", size_multiple("x", 1, 128)),
    _triton("swiglu", "activation"),
    _triton("swiglu_packed", "activation"),
    _triton("swiglu_packed_quantize", "activation", size_multiple("gate_up", 1, 256)),
    _triton("quantize_blocks", "quantize", size_multiple("x", 1, 128)),
    _triton("quantize_tensor", "quantize"),
    _triton("embedding", "embedding"),
    # RoPE and the caches
    _triton("rope_interleaved", "rope"),
    _triton("rope_half", "rope"),
    _triton("write_latent_cache", "latent_cache"),
    _triton("write_index_cache", "latent_cache"),
    _triton("norm_rope_write_latent_cache", "latent_cache"),
    _triton("norm_rope_write_latent_cache_fp8", "latent_cache"),
    _triton("norm_rope_write_latent_cache_fp8_tensor", "latent_cache"),
    _triton("write_index_key_fp8", "index_key"),
    _triton("index_query_quantize", "index_query"),
    _triton("dense_slots", "slots"),
    # the indexer
    _triton(
        "paged_index_topk",
        "index_topk",
        value_multiple("topk", 4),
        value_at_most("topk", 2048),
        size_multiple("q", 2, 4),
    ),
)

# Ops whose reference is a few of torch's own kernels, on any device and without a look at data.
TORCH_OPS = (
    "absorb_query",
    "embedding",
    "expand_output",
    "linear",
    "rope_tables",
)


def implementations(op: str, target: str) -> tuple[Implementation, ...]:
    """What implements an op for a target, the preferred first.

    Args:
        op: name without namespace and overload.
        target: ``"cpu"`` or an architecture.
    """
    if target == "cpu":
        return (Implementation(op, "reference", "", ("cpu",)),) if op in _BY_NAME else ()
    found = [k for k in KERNELS if k.op == op and target in k.targets]
    if op in TORCH_OPS:
        found.append(Implementation(op, "torch", "", GPUS, note="torch's own kernels"))
    return tuple(found)


def load(op: str, provider: str, target: str) -> Callable[..., Any] | None:
    """The function of an op, or None if this installation does not list that provider for it.

    Raises:
        UserError: the provider is not installed here.
    """
    for kernel in implementations(op, target):
        if kernel.provider == provider:
            return kernel.load() if kernel.function else _BY_NAME[op]
    return None


_BY_NAME = {str(op).split(".")[1]: function for op, function in REFERENCE.items()}
