"""Every implementation of every kernel op, in order of preference.

The order is what was measured (``docs/kernels.md``), not habit. ``dsa-compile --explain-kernels``
prints what this table gave for a model and why the others were left.
"""

from collections.abc import Callable
from typing import Any

import torch

from dsa_compile.kernels.facts import (
    Condition,
    dtype_in,
    size_at_most,
    size_in,
    size_multiple,
    size_power_of_two,
    value_at_most,
    value_multiple,
)
from dsa_compile.kernels.implementation import GPUS, HOPPER, Implementation
from dsa_compile.ops import REFERENCE

_TRITON = "dsa_compile.kernels.triton"
_CUDA = "dsa_compile.kernels.cuda"
_PEERS = "dsa_compile.kernels.peers"

_BF16 = torch.bfloat16
_WIDEST = 32768  # a row that one program of Triton's holds


def _triton(op: str, module: str, *conditions: Condition, note: str = "") -> Implementation:
    return Implementation(op, "triton", f"{_TRITON}.{module}:{op}", GPUS, conditions, note=note)


def _cuda(
    op: str,
    module: str,
    *conditions: Condition,
    targets: tuple[str, ...] = GPUS,
    max_tokens: int | None = None,
    note: str = "",
) -> Implementation:
    function = f"{_CUDA}.{module}:{op}"
    return Implementation(op, "cuda", function, targets, conditions, max_tokens, note)


def _peer(
    op: str,
    provider: str,
    *conditions: Condition,
    module: str = "",
    max_tokens: int | None = None,
    note: str = "",
) -> Implementation:
    function = f"{_PEERS}.{module or provider}:{op}"
    return Implementation(op, provider, function, (HOPPER,), conditions, max_tokens, note)


def _norm_quantize(op: str) -> tuple[Implementation, ...]:
    return (
        _cuda(op, "norm_quantize", dtype_in("x", _BF16), size_multiple("x", -1, 256)),
        _triton(op, "norm_quantize", size_multiple("x", -1, 128), size_at_most("x", -1, _WIDEST)),
    )


def _latent_row(op: str) -> tuple[Implementation, ...]:
    conditions = (dtype_in("kv", _BF16), size_multiple("weight", 0, 256), size_in("cos", -1, 64))
    return (
        _cuda(op, "latent_row", *conditions),
        _triton(op, "latent_cache", size_power_of_two("weight", 0)),
    )


KERNELS: tuple[Implementation, ...] = (
    # norms, activations, quantisation
    _triton("rms_norm", "norm", size_at_most("x", -1, _WIDEST)),
    _triton("add_rms_norm", "norm", size_at_most("x", -1, _WIDEST)),
    _triton("layer_norm", "norm", size_at_most("x", -1, _WIDEST)),
    *_norm_quantize("rms_norm_quantize"),
    *_norm_quantize("rms_norm_quantize_keep"),
    *_norm_quantize("add_rms_norm_quantize"),
    _triton("swiglu", "activation"),
    _triton("swiglu_packed", "activation"),
    _cuda(
        "swiglu_packed_quantize",
        "swiglu_quantize",
        dtype_in("gate_up", _BF16),
        size_multiple("gate_up", -1, 256),
    ),
    _triton("swiglu_packed_quantize", "activation", size_multiple("gate_up", -1, 256)),
    _triton("quantize_blocks", "quantize", size_multiple("x", -1, 128)),
    _triton("quantize_tensor", "quantize"),
    _triton("embedding", "embedding"),
    # RoPE and the caches
    _triton("rope_interleaved", "rope", size_power_of_two("x", -1)),
    _triton("rope_half", "rope", size_power_of_two("x", -1)),
    _triton("write_latent_cache", "latent_cache"),
    _triton("write_index_cache", "latent_cache"),
    *_latent_row("norm_rope_write_latent_cache"),
    *_latent_row("norm_rope_write_latent_cache_fp8"),
    *_latent_row("norm_rope_write_latent_cache_fp8_tensor"),
    _triton("dense_slots", "slots"),
    # the indexer
    _cuda(
        "write_index_key_fp8",
        "index_quantize",
        dtype_in("k", _BF16),
        size_in("k", 1, 128),
        size_in("cos", -1, 64),
    ),
    _triton("write_index_key_fp8", "index_key", size_in("k", 1, 128), size_in("cos", -1, 64)),
    _cuda(
        "index_query_quantize",
        "index_quantize",
        dtype_in("q", _BF16),
        size_in("q", 2, 128),
        size_multiple("q", 1, 16),
        size_in("cos", -1, 64),
    ),
    _triton("index_query_quantize", "index_query", size_in("q", 2, 128), size_in("cos", -1, 64)),
    # what attention makes of its projections
    _cuda(
        "attention_inputs_fp8",
        "attention_inputs",
        dtype_in("merged", _BF16),
        size_multiple("q_weight", 0, 256),
        size_in("k_weight", 0, 128),
        size_multiple("kv_weight", 0, 256),
        size_in("cos", -1, 64),
        note="one launch up to 512 tokens",
    ),
    _triton(
        "attention_inputs_fp8",
        "attention_inputs",
        size_multiple("q_weight", 0, 128),
        size_in("k_weight", 0, 128),
        size_power_of_two("kv_weight", 0),
        size_in("cos", -1, 64),
        note="a launch for each part",
    ),
    _cuda(
        "attention_queries_fp8",
        "attention_queries",
        dtype_in("q_pe", _BF16),
        dtype_in("index_q", _BF16),
        size_multiple("q_pe", 1, 16),
        size_multiple("index_q", 1, 16),
        size_in("index_q", 2, 128),
        size_in("cos", -1, 64),
    ),
    _triton(
        "attention_queries_fp8",
        "attention_inputs",
        size_in("index_q", 2, 128),
        size_in("cos", -1, 64),
        note="a launch for each part",
    ),
    _triton(
        "paged_index_topk",
        "index_topk",
        value_multiple("topk", 4),
        value_at_most("topk", 2048),
        size_multiple("q", 2, 4),
    ),
    # experts and their router
    _triton("router", "router", size_at_most("weight", 0, 1024)),
    _triton("experts", "experts"),
    _cuda(
        "experts_fp8",
        "experts_fp8",
        size_multiple("x", 1, 256),
        size_multiple("down", 2, 128),
        size_at_most("down", 0, 1024),
        targets=(HOPPER,),
    ),
    _peer(
        "experts_fp8",
        "deep_gemm",
        size_multiple("x", 1, 128),
        size_multiple("down", 2, 128),
        module="deep_gemm_experts",
    ),
    _triton("experts_fp8", "experts", size_multiple("x", 1, 128), size_multiple("down", 2, 128)),
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
