"""The elementwise kernels beside the references: run by test_elementwise.py in a process.

Under the interpreter (``TRITON_INTERPRET=1``, rounding as the hardware) or on a GPU. Sums have
another order than the references', so a few results may be one step of their dtype away.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels.registry import load
from dsa_compile.kernels.triton import (
    activation,
    attention_inputs,
    embedding,
    index_key,
    index_query,
    latent_cache,
    norm,
    norm_quantize,
    quantize,
    rope,
    rope_tables,
    slots,
)
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.fused_cache import fp8_row_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
EPS = 1e-6
SHARE = 0.005
"""Share of the bytes that may differ."""
# fp32 results are scales and products of values rounded to bf16, whose step they inherit
STEP = {torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3, torch.float32: 2**-7}

TRITON = (
    activation, attention_inputs, embedding, index_key, index_query, latent_cache, norm,
    norm_quantize, quantize, rope, rope_tables, slots,
)  # fmt: skip
CUDA: tuple[ModuleType, ...] = ()
if not INTERPRETED:
    from dsa_compile.kernels.cuda import attention_inputs as cuda_attention_inputs
    from dsa_compile.kernels.cuda import (
        index_quantize,
        latent_row,
        swiglu_quantize,
    )
    from dsa_compile.kernels.cuda import norm_quantize as cuda_norm_quantize

    CUDA = (
        cuda_attention_inputs, index_quantize, latent_row, cuda_norm_quantize,
        swiglu_quantize,
    )  # fmt: skip

if INTERPRETED:
    from tests.kernels.interpreter import round_as_hardware

    round_as_hardware()


def reference(name: str):
    return REFERENCE[getattr(torch.ops.dsa, name).default]


def kernel(name: str) -> Callable:
    found = load(name, "triton", "sm_90a")
    assert found is not None
    return found


def to(device: str, args):
    return [a.to(device) if isinstance(a, Tensor) else a for a in args]


@pytest.fixture(autouse=True)
def poisoned_outputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """``torch.empty`` gives NaN, and the largest value of whole numbers."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def providers(op: str, cuda: bool) -> Iterator[Callable]:
    """Kernels of an op; the CUDA ones too, where there is a GPU and they take the shape."""
    for module in (*TRITON, *(CUDA if cuda else ())):
        if getattr(getattr(module, op, None), "__module__", "") == module.__name__:
            yield getattr(module, op)


def check(op: str, *args, cuda: bool = True) -> None:
    """Results of every provider beside those of the reference."""
    want = reference(op)(*args)
    for kernel in providers(op, cuda):
        got = kernel(*to(DEVICE, args))
        for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            close(g.cpu(), w)


def check_write(op: str, *args, cache: Tensor, slot_mapping: Tensor, cuda: bool = True) -> None:
    """Bytes of a cache after every provider beside those after the reference."""
    want = cache.clone()
    reference(op)(*args, want, slot_mapping)
    assert not torch.equal(want.view(torch.uint8), cache.view(torch.uint8))
    for kernel in providers(op, cuda):
        got = cache.clone().to(DEVICE)
        kernel(*to(DEVICE, args), got, slot_mapping.to(DEVICE))
        close(got.cpu(), want)


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    differing = (got.view(torch.uint8) != want.view(torch.uint8)).sum().item()
    share = differing / max(1, got.numel() * got.element_size())
    assert share <= SHARE, f"{share:.2%} of the bytes differ"
    if want.dtype.is_floating_point:
        g, w = got.double(), want.double()
        step = STEP[want.dtype]
        largest = w.abs().max().item() if w.numel() else 0.0
        torch.testing.assert_close(g, w, rtol=step, atol=step * 2**-6 * largest)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def tables(
    tokens: int, dtype: torch.dtype = torch.bfloat16, rope_dim: int = 64
) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 160_000, (tokens,))
    inv_freq = 10_000 ** -(torch.arange(rope_dim // 2) / (rope_dim // 2))
    return torch.ops.dsa.rope_tables(positions, inv_freq, 1.0, dtype)


@pytest.mark.parametrize("shape", [(1, 128), (3, 384), (2, 2, 1536), (0, 256)], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms(shape: tuple[int, ...], weight_dtype: torch.dtype) -> None:
    x, residual, bias = bf16(*shape), bf16(*shape), bf16(shape[-1])
    weight = torch.randn(shape[-1]).to(weight_dtype)
    check("rms_norm", x, weight, EPS)
    check("add_rms_norm", x, residual, weight, EPS)
    # not to the last bit: the reference's sums have torch's order
    got = norm.layer_norm(*to(DEVICE, (x, weight, bias, EPS))).cpu()
    want = reference("layer_norm")(x.double(), weight.double(), bias.double(), EPS)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)


PARTIAL = (1, 96), (3, 16), (2, 2, 400)
"""Shapes of rows whose last block of 128 is none."""


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(1, 128), (3, 384), (2, 2, 1536), (0, 256), *PARTIAL], ids=str)
def test_norms_that_quantize(shape: tuple[int, ...], ue8m0: bool) -> None:
    x, residual, weight = bf16(*shape), bf16(*shape), torch.randn(shape[-1])
    cuda = shape[-1] % 256 == 0
    check("rms_norm_quantize", x, weight, EPS, ue8m0, cuda=cuda)
    check("rms_norm_quantize_keep", x, weight.bfloat16(), EPS, ue8m0, cuda=cuda)
    check("add_rms_norm_quantize", x, residual, weight, EPS, ue8m0, cuda=cuda)


def test_rows_may_lie_apart() -> None:
    merged = bf16(5, 1000)
    rows = merged[:, 200:712]
    weight = torch.randn(512)
    check("rms_norm", rows, weight, EPS)
    check("rms_norm_quantize", rows, weight, EPS, False)
    check("quantize_blocks", rows, False)
    check("swiglu_packed_quantize", merged[:, 104:616], False)
    check("swiglu", merged[:, 3:300], merged[:, 500:797])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks(dtype: torch.dtype, ue8m0: bool) -> None:
    x = (torch.randn(9, 512) * torch.logspace(-6, 4, 9).unsqueeze(1)).to(dtype)
    x[4, 128:256] = 0
    check("quantize_blocks", x, ue8m0)
    check("quantize_blocks", x.view(3, 3, 512), ue8m0)


@pytest.mark.parametrize("shape", PARTIAL, ids=str)
def test_partial_blocks(shape: tuple[int, ...]) -> None:
    check("quantize_blocks", bf16(*shape), True)
    apart = bf16(5, 1000)[:, 200 : 200 + shape[-1]]
    check("quantize_blocks", apart, False)
    check("rms_norm_quantize", apart, torch.randn(shape[-1]), EPS, False, cuda=False)


@pytest.mark.parametrize("width", [128, 384, 32, 200])
def test_gated_activation(width: int) -> None:
    gate_up = bf16(3, 2 * width) * 4
    check("swiglu_packed", gate_up)
    check("swiglu", *gate_up.chunk(2, -1))
    cuda = width % 128 == 0
    check("swiglu_packed_quantize", gate_up, False, cuda=cuda)
    check("swiglu_packed_quantize", gate_up, True, cuda=cuda)
    check("swiglu_packed_quantize", bf16(5, 1000)[:, 8 : 8 + 2 * width], True, cuda=False)


@pytest.mark.parametrize("op", ["rope_interleaved", "rope_half"])
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_rope_of_a_slice_of_wider_heads(op: str, heads: int) -> None:
    check(op, bf16(6, heads, 96)[..., 32:], *tables(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("half", [2, 32, 48])
def test_rope_tables(dtype: torch.dtype, half: int) -> None:
    inv_freq = 10_000 ** -(torch.arange(half) / half)
    for scaling, shape in ((1.0, (1,)), (1.37, (3, 5))):
        args = torch.randint(0, 163_840, shape), inv_freq, scaling, dtype
        want = reference("rope_tables")(*args)
        for kernel in providers("rope_tables", cuda=False):
            for g, w in zip(kernel(*to(DEVICE, args)), want, strict=True):
                assert g.dtype is dtype
                assert g.is_contiguous()
                # libraries' cosines differ in the last bit, which may cross a tie of bf16
                step = 2**-22 if dtype is torch.float32 else 2**-8
                torch.testing.assert_close(g.cpu(), w, rtol=0.0, atol=scaling * step)


def test_embedding_marks_unknown_ids() -> None:
    weight, ids = bf16(7, 300), torch.tensor([[6, 0], [3, 3]])
    check("embedding", ids, weight)
    beyond = embedding.embedding(torch.tensor([7, 1, -1], device=DEVICE), weight.to(DEVICE)).cpu()
    assert beyond[[0, 2]].isnan().all()
    assert torch.equal(beyond[1], weight[1])


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_cache_writes(block_size: int, interleaved: bool) -> None:
    tokens, blocks = 19, 3
    slot_mapping = torch.randperm(blocks * block_size)[:tokens]
    slot_mapping[[2, 17]] = -1
    merged = bf16(tokens, 2240)
    kv, k = merged[:, 1664:], merged[:, 1536:1664]
    latent = (kv, torch.randn(512), EPS, *tables(tokens, torch.float32), interleaved)
    for ue8m0 in (False, True):
        check_write(
            "norm_rope_write_latent_cache_fp8",
            *latent,
            ue8m0,
            cache=poison(blocks, block_size, 656),
            slot_mapping=slot_mapping,
        )
    check_write(
        "norm_rope_write_latent_cache_fp8_tensor",
        *latent,
        torch.tensor([0.01]),
        cache=poison(blocks, block_size, 576),
        slot_mapping=slot_mapping,
    )
    check_write(
        "write_index_key_fp8",
        k,
        torch.randn(128),
        torch.randn(128),
        EPS,
        *tables(tokens),
        interleaved,
        cache=poison(blocks, block_size, 132),
        slot_mapping=slot_mapping,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("rank", "rope_dim", "index_dim"), [(64, 16, 32), (16, 32, 64), (256, 2, 16)]
)
def test_narrow_cache_writes(rank: int, rope_dim: int, index_dim: int, interleaved: bool) -> None:
    tokens, blocks, block_size = 19, 3, 16
    slot_mapping = torch.randperm(blocks * block_size)[:tokens]
    slot_mapping[[2, 17]] = -1
    places = {"slot_mapping": slot_mapping, "cuda": False}
    turns = (*tables(tokens, torch.float32, rope_dim), interleaved)
    latent = (bf16(tokens, rank + rope_dim), torch.randn(rank), EPS, *turns)
    rows = poison(blocks, block_size, fp8_row_bytes(rank, rope_dim))
    check_write("norm_rope_write_latent_cache_fp8", *latent, True, cache=rows, **places)
    check_write(
        "norm_rope_write_latent_cache_fp8_tensor", *latent, torch.tensor([0.01]),
        cache=poison(blocks, block_size, rank + rope_dim), **places,
    )  # fmt: skip
    for width in {index_dim, max(16, rope_dim)}:
        check_write(
            "write_index_key_fp8", bf16(tokens, 99)[:, 3 : 3 + width], torch.randn(width),
            torch.randn(width), EPS, *turns, cache=poison(blocks, block_size, width + 4), **places,
        )  # fmt: skip
        weights = torch.randn(tokens, 5)
        check("index_query_quantize", bf16(tokens, 5, width), weights, *turns, 0.1, cuda=False)


def poison(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_plain_cache_writes_and_slots_outside() -> None:
    cache, slot_mapping = bf16(3, 16, 40), torch.tensor([5, -1, 47, 0])
    check_write(
        "write_latent_cache",
        bf16(4, 24),
        bf16(4, 16),
        cache=cache,
        slot_mapping=slot_mapping,
    )
    check_write("write_index_cache", bf16(4, 40), cache=cache, slot_mapping=slot_mapping)
    target = cache.to(DEVICE)
    outside = torch.tensor([48, 1 << 40, -2, -(1 << 40)], device=DEVICE)
    latent_cache.write_index_cache(bf16(4, 40).to(DEVICE), target, outside)
    assert torch.equal(target.cpu(), cache)


@pytest.mark.parametrize("heads", [64, 16, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_index_query(heads: int, interleaved: bool) -> None:
    weights = torch.randn(3, heads)
    for table_dtype in (torch.bfloat16, torch.float32):
        check(
            "index_query_quantize",
            bf16(3, heads, 128),
            weights,
            *tables(3, table_dtype),
            interleaved,
            0.011,
            cuda=heads % 16 == 0,
        )


@pytest.mark.parametrize("rows", ["fp8", "fp8 tensor"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_inputs(interleaved: bool, rows: str) -> None:
    merged, slot_mapping = bf16(19, 2240), torch.randperm(3 * 64)[:19]
    slot_mapping[4] = -1
    args = (
        merged, torch.randn(1536), EPS, torch.randn(128), torch.randn(128), EPS, torch.randn(512),
        EPS, *tables(19), interleaved, not interleaved, False,
    )  # fmt: skip
    caches = poison(3, 64, 656 if rows == "fp8" else 576), poison(3, 64, 132)
    scale = [torch.tensor([0.03])] if rows == "fp8 tensor" else []
    want = [cache.clone() for cache in caches]
    results = reference("attention_inputs_fp8")(*args, *want, slot_mapping, *scale)
    for kernel in providers("attention_inputs_fp8", cuda=True):
        got = [cache.clone().to(DEVICE) for cache in caches]
        returned = kernel(*to(DEVICE, args), *got, slot_mapping.to(DEVICE), *to(DEVICE, scale))
        for g, w in zip((*returned, *got), (*results, *want), strict=True):
            close(g.cpu(), w)


def test_dense_slots() -> None:
    block_tables = torch.tensor([[3, 1, -1], [0, 2, 4], [5, -1, -1]], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 1, 6, 8], dtype=torch.int32)
    context_lens = torch.tensor([7, 9, 0], dtype=torch.int32)
    for width in (1, 12, 30):
        args = (cu_seqlens, context_lens, torch.zeros(10, dtype=torch.int64), 4, width)
        check("dense_slots", block_tables, *args)
    empty = torch.empty((0, 3), dtype=torch.int32)
    check("dense_slots", empty, cu_seqlens[:1], context_lens[:0], args[2], 4, 12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel("rms_norm")(bf16(2, 8), bf16(1), EPS), "dsa::rms_norm takes weight"),
        (
            lambda: kernel("rope_half")(bf16(2, 3, 8), bf16(2, 16), bf16(2, 16)),
            "dsa::rope_half takes",
        ),
        (
            lambda: kernel("index_query_quantize")(
                torch.randn(2, 4, 128), torch.randn(2, 4), bf16(2, 64), bf16(2, 64), True, 1.0
            ),
            "takes q in bfloat16, float16, not float32",
        ),
        (
            lambda: kernel("index_query_quantize")(
                bf16(2, 4, 48), torch.randn(2, 4), bf16(2, 16), bf16(2, 16), True, 1.0
            ),
            "D & D - 1 == 0, not D = 48",
        ),
        (
            lambda: latent_cache.write_index_cache(
                bf16(2, 8), bf16(2, 8, 16)[..., :8], torch.tensor([0, 1])
            ),
            "contiguous",
        ),
    ],
)
def test_wrong_input_is_refused_on_the_host(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
