"""Norms, activations, RoPE and cache writes, with and without quantisation, at V3.2's sizes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_compile.kernels.implementation import HOPPER
from dsa_compile.kernels.registry import implementations
from dsa_compile.measure.case import Call, Case, Plan, is_ours
from dsa_compile.measure.suites import elementwise_vllm as vllm
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.quantize import E4M3

TOKENS = (1, 64, 4096)
HIDDEN, Q_LORA, MERGED = 7168, 1536, 2240
"""Width of the stream, of the query's low rank, and of the merged first projections."""
INTERMEDIATE = (2048, 18432)
HEADS, INDEX_HEADS = 128, 64
BLOCKS, BLOCK_SIZE = 128, 64
EPS = 1e-6
INPUT_BYTES = 150e6
"""Size of all copies of the inputs, which calls take in turn from some hundred tokens on, so that
they come from memory; a few tokens' are in L2, as where they come from a GEMM just before."""
MOST_COPIES = 24
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.bfloat16: 4e-3,
    torch.float32: 4e-3,
    E4M3: 2e-2,
    torch.uint8: 2e-2,
}
"""Relative error of all values together; of bytes, the share that differs."""


def plans() -> Iterator[Plan]:
    """Plans of every op, by number of tokens."""
    for tokens in TOKENS:
        for width in (HIDDEN, Q_LORA):
            shape = f"{tokens:,}×{width:,}"
            for op in _NORMS:
                yield Plan(op, shape, partial(_norm, op, tokens, width))
        for width in INTERMEDIATE:
            for op in ("swiglu_packed", "swiglu_packed_quantize"):
                yield Plan(op, f"{tokens:,}×{width:,}", partial(_activation, op, tokens, width))
        yield Plan("rope_interleaved", f"{tokens:,}×{HEADS}×64", partial(_rope, tokens))
        for op in _LATENT:
            yield Plan(op, f"{tokens:,}", partial(_latent, op, tokens))
        yield Plan("write_index_key_fp8", f"{tokens:,}", partial(_index_key, tokens))
        yield Plan(
            "index_query_quantize", f"{tokens:,}×{INDEX_HEADS}×128", partial(_index_query, tokens)
        )
        yield Plan("attention_inputs_fp8", f"{tokens:,}", partial(_attention_inputs, tokens))


def _bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _copies(tokens: int, moved: float, make: Callable[[], Any]) -> list[Any]:
    if tokens <= TOKENS[1]:
        return [make()]
    return [make() for _ in range(max(2, min(MOST_COPIES, round(INPUT_BYTES / moved))))]


def _tables(tokens: int) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 160_000, (tokens,), device="cuda")
    inv_freq = 10_000 ** -(torch.arange(32, device="cuda") / 32)
    cos, sin = torch.ops.dsa.rope_tables(positions, inv_freq, 1.0, torch.bfloat16)
    return cos, sin


def _reference(op: str) -> Callable[..., Any]:
    return REFERENCE[getattr(torch.ops.dsa, op).default]


def _close(want: Any) -> Callable[[Any], str | None]:
    """Compares results, one or several."""
    wanted = want if isinstance(want, tuple) else (want,)

    def check(got: Any) -> str | None:
        for i, (g, w) in enumerate(
            zip(got if isinstance(got, tuple) else (got,), wanted, strict=True)
        ):
            if w.dtype is torch.uint8:
                error = float((g.view(torch.uint8) != w).float().mean())
            else:
                error = float((g.float() - w.float()).norm() / w.float().norm())
            if not error < TOLERANCE[w.dtype]:
                return f"result {i}: error {error:.1e}"
        return None

    return check


def _ours(op: str) -> dict[str, Callable[..., Any]]:
    """Our functions of an op, by provider."""
    return {
        kernel.provider: kernel.load()
        for kernel in implementations(op, HOPPER)
        if is_ours(kernel.provider)
    }


def _case(
    op: str, inputs: list[tuple[Any, ...]], moved: float, peer: Callable[..., Any] | None = None
) -> Case:
    """A case of an op that returns its results.

    Args:
        op: name.
        inputs: arguments of the op, several to be taken in turn.
        moved: bytes.
        peer: the same of vLLM's, returning the same results.
    """
    reference = _reference(op)
    candidates: dict[str, list[Call]] = {
        name: [partial(function, *args) for args in inputs] for name, function in _ours(op).items()
    }
    candidates["torch"] = [partial(reference, *args) for args in inputs]
    want = reference(*inputs[0])
    unavailable = {}
    if peer:
        if problem := vllm.missing():
            unavailable["vllm"] = problem
        else:
            candidates["vllm"] = [partial(peer, *args) for args in inputs]
    return Case(candidates, _close(want), bytes=moved, unavailable=unavailable)


def _write_case(
    op: str, inputs: list[tuple[Any, ...]], caches: tuple[Tensor, ...], moved: float
) -> Case:
    """A case of an op that writes rows of caches; calls return results and the caches' bytes."""
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[: inputs[0][0].shape[0]]
    slot_mapping = slots.cuda()

    def calls(function: Callable[..., Any]) -> list[Call]:
        own = [cache.clone() for cache in caches]  # no provider is credited with another's rows

        def call(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
            results = function(*args, *own, slot_mapping) or ()
            return (*results, *(cache.view(torch.uint8) for cache in own))

        return [partial(call, args) for args in inputs]

    written = [cache.cpu().clone() for cache in caches]
    host = [a.cpu() if isinstance(a, Tensor) else a for a in inputs[0]]
    results = _reference(op)(*host, *written, slots) or ()
    want = (*results, *(cache.view(torch.uint8) for cache in written))
    candidates = {name: calls(function) for name, function in _ours(op).items()}
    return Case(candidates, _close(tuple(w.cuda() for w in want)), bytes=moved)


# Op → bytes a value read and written, and vLLM's function.
_NORMS: Mapping[str, tuple[int, Callable[..., Any] | None]] = {
    "rms_norm": (4, vllm.rms_norm),
    "add_rms_norm": (8, None),  # vLLM's works in place
    "rms_norm_quantize": (3, vllm.rms_norm_quantize),
    "rms_norm_quantize_keep": (5, None),
    "add_rms_norm_quantize": (9, None),
    "quantize_blocks": (3, vllm.quantize_blocks),
}


def _norm(op: str, tokens: int, width: int) -> Case:
    moved, peer = _NORMS[op]
    rest: tuple[Any, ...] = () if op == "quantize_blocks" else (_bf16(width), EPS)
    if "quantize" in op:
        rest += (False,)

    def make() -> tuple[Any, ...]:
        x = _bf16(tokens, width)
        return (x, _bf16(tokens, width), *rest) if op.startswith("add") else (x, *rest)

    total = tokens * width * moved
    return _case(op, _copies(tokens, total, make), total, peer)


def _activation(op: str, tokens: int, width: int) -> Case:
    quantized = op.endswith("quantize")
    moved = tokens * width * (5 if quantized else 6)

    def make() -> tuple[Any, ...]:
        gate_up = _bf16(tokens, 2 * width)
        return (gate_up, False) if quantized else (gate_up,)

    peer = vllm.swiglu_packed_quantize if quantized else vllm.swiglu_packed
    return _case(op, _copies(tokens, moved, make), moved, peer)


def _rope(tokens: int) -> Case:
    cos, sin = _tables(tokens)
    moved = tokens * (HEADS * 64 * 4 + 2 * 64)

    def make() -> tuple[Any, ...]:
        return _bf16(tokens, HEADS, 192)[..., 128:], cos, sin

    return _case("rope_interleaved", _copies(tokens, moved, make), moved)


# Op → bytes of a row, and the arguments between the layout flag and the cache.
_LATENT: Mapping[str, tuple[int, tuple[Any, ...]]] = {
    "norm_rope_write_latent_cache_fp8": (656, (False,)),
    "norm_rope_write_latent_cache_fp8_tensor": (576, (0.01,)),
}


def _latent(op: str, tokens: int) -> Case:
    row, extra = _LATENT[op]
    cos, sin = _tables(tokens)
    weight = _bf16(512)
    more = tuple(torch.tensor([e], device="cuda") if type(e) is float else e for e in extra)
    cache = torch.zeros((BLOCKS, BLOCK_SIZE, row), dtype=torch.uint8, device="cuda")
    moved = tokens * (1152 + row + 2 * 64)

    def make() -> tuple[Any, ...]:
        return (_bf16(tokens, MERGED)[:, -576:], weight, EPS, cos, sin, True, *more)

    return _write_case(op, _copies(tokens, tokens * MERGED * 2, make), (cache,), moved)


def _index_key(tokens: int) -> Case:
    cos, sin = _tables(tokens)
    weight, bias = torch.randn(128, device="cuda"), torch.randn(128, device="cuda")
    cache = torch.zeros((BLOCKS, BLOCK_SIZE, 132), dtype=torch.uint8, device="cuda")
    moved = tokens * (256 + 132 + 2 * 64)

    def make() -> tuple[Any, ...]:
        return (_bf16(tokens, MERGED)[:, Q_LORA:][:, :128], weight, bias, EPS, cos, sin, False)

    copies = _copies(tokens, tokens * MERGED * 2, make)
    return _write_case("write_index_key_fp8", copies, (cache,), moved)


def _index_query(tokens: int) -> Case:
    cos, sin = _tables(tokens)
    weights = torch.randn(tokens, INDEX_HEADS, device="cuda")
    moved = tokens * (INDEX_HEADS * (3 * 128 + 8) + 2 * 64)

    def make() -> tuple[Any, ...]:
        return _bf16(tokens, INDEX_HEADS, 128), weights, cos, sin, False, 0.011

    return _case("index_query_quantize", _copies(tokens, moved, make), moved)


def _attention_inputs(tokens: int) -> Case:
    cos, sin = _tables(tokens)
    norms = (_bf16(Q_LORA), EPS, _bf16(128), _bf16(128), EPS, _bf16(512), EPS)
    caches = tuple(
        torch.zeros((BLOCKS, BLOCK_SIZE, row), dtype=torch.uint8, device="cuda")
        for row in (656, 132)
    )
    moved = tokens * (MERGED * 2 + Q_LORA + Q_LORA // 32 + 656 + 132 + 2 * 64)

    def make() -> tuple[Any, ...]:
        return (_bf16(tokens, MERGED), *norms, cos, sin, True, False, False)

    return _write_case("attention_inputs_fp8", _copies(tokens, moved, make), caches, moved)
