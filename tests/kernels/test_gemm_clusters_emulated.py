"""Products of FP8 by clusters of blocks on the CPU, a thread for a thread."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import experts_fp8_many, gemm_fp8_large
from dsa_compile.kernels.cuda.gemm_fp8_large import TILES
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.ops.experts_fp8 import experts_fp8
from dsa_compile.ops.quantize import quantize_blocks
from tests.kernels import emulator
from tests.kernels.test_gemm_fp8 import error, exact, operands

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

WRITTEN_OUT = (
    *("mbarrier_arrive_slot", "cluster_meet", "load_shared_float2", "descriptor_at"),
    *("tma_load_3d_once", "tma_store_2d", "bulk_commit", "bulk_wait_read", "bulk_load_both"),
    *("load_acquire", "add_release", "fence_async", "math_thread", "store_matrices"),
)
"""Functions that ``cluster_emulator.h`` has in place of the sources', or that nothing calls."""


class TensorMap(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 2),
        ("stride", ctypes.c_longlong),
        ("box", ctypes.c_int * 2),
        ("element", ctypes.c_int),
        ("swizzled", ctypes.c_bool),
    )


def tensor_map(tensor: Tensor, box, *, swizzle: int = 128, l2_promotion: int = 0) -> TensorMap:
    """A map as the emulator takes it, innermost dimension first."""
    rows, columns = tensor.shape
    size = tensor.element_size()
    return TensorMap(
        tensor.data_ptr(),
        (ctypes.c_longlong * 2)(columns, rows),
        tensor.stride(0) * size,
        (ctypes.c_int * 2)(box[1], box[0]),
        size,
        swizzle == 128,
    )


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulator.use_headers(monkeypatch, tmp_path, "products_in_flight.h", "cluster_emulator.h")
    usual = emulator._portable

    def portable(text: str) -> str:
        if text.startswith(("// FP8 warpgroup products", "// Accumulators of products")):
            return '#pragma once\n#include "common.cuh"\n'
        text = emulator.without(text, WRITTEN_OUT)
        text = re.sub(r"extern __shared__ [^;]*;\n", "", text)
        return usual(text)

    monkeypatch.setattr(emulator, "_portable", portable)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    monkeypatch.setattr(CudaKernel, "resident_clusters", lambda self, threads, cluster: 1)
    for module in (gemm_fp8_large, experts_fp8_many):
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(gemm_fp8_large, "multiprocessors", lambda device: 132)
    torch.manual_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES[:1], ids=str)
@pytest.mark.parametrize("tokens", [300, 1100])
def test_projections(tokens: int, tile: gemm_fp8_large.Tile) -> None:
    """One cluster takes all tiles, of which some have no tokens or no columns."""
    x, x_scale, weight, weight_scale = operands(tokens, 200, 640)
    by_column = torch.nn.functional.pad(x_scale.t(), (0, -tokens % 4)).contiguous().t()[:tokens]
    out = gemm_fp8_large.linear_large(x, by_column, weight, weight_scale, tile)
    assert error(out, exact(x, x_scale, weight, weight_scale)) < 3e-3


def ordered(kernels, indices: Tensor, x: Tensor, x_scale: Tensor, experts: int):
    """Rows of :func:`~experts_fp8_many.order_rows`, without its kernels."""
    pairs, blocks = indices.flatten(), x.shape[1] // 128
    row_of = torch.full_like(pairs, -1, dtype=torch.int32)
    slots, row = [], 0
    for expert in range(experts):
        mine = (pairs == expert).nonzero().flatten()
        row_of[mine] = torch.arange(row, row + len(mine), dtype=torch.int32)
        for start in range(0, len(mine), 256):
            count = min(len(mine) - start, 256)
            kinds = (0,) if count <= 128 else (1, 2)
            slots += [(expert, row + start, count, kind) for kind in kinds]
        row += -(-len(mine) // 8) * 8
    capacity = -(-row // 16) * 16
    token = torch.arange(len(pairs)) // indices.shape[1]
    present = row_of >= 0
    values = torch.zeros(blocks, capacity, 8, 16, dtype=torch.uint8)
    chunks = x.view(torch.uint8).view(len(x), blocks, 8, 16)[token[present]].transpose(0, 1)
    for chunk in range(8):
        place = chunk ^ (row_of[present].long() % 8)
        values[:, row_of[present].long(), place] = chunks[:, :, chunk]
    scales = torch.zeros(blocks, capacity)
    scales[:, row_of[present].long()] = x_scale[token[present]].t()
    return experts_fp8_many.Rows(
        values=values.view(blocks, capacity, 128),
        scales=scales,
        row_of=row_of,
        slots=torch.tensor(slots, dtype=torch.int32),
        slot_counts=torch.tensor([len(slots), row], dtype=torch.int32),
        finished=torch.zeros(len(slots), dtype=torch.int32),
    )


def combine(hidden: int, top_k: int):
    def weighted(grid, threads, outputs, weights, row_of, out) -> None:
        rows = outputs.float()[row_of.long().clamp(min=0)].view(len(out), top_k, hidden)
        kept = weights * (row_of >= 0).view(len(out), top_k)
        out.copy_((rows * kept[..., None]).sum(1))

    return weighted


@pytest.mark.slow
def test_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs, a pair whose second block has few rows, a rest of few and one of many."""
    monkeypatch.setattr(experts_fp8_many, "order_rows", ordered)
    monkeypatch.setattr(experts_fp8_many, "combine_kernel", combine)
    hidden, inner, counts = 1024, 512, [150, 0, 40, 356, 9, 100]
    pairs = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    indices = torch.cat((pairs, torch.tensor([-1])))[torch.randperm(len(pairs) + 1)].view(-1, 2)
    tokens = len(indices)
    x, x_scale = quantize_blocks(torch.randn(tokens, hidden), False)
    gate_up, down = (
        torch.randn(len(counts), *shape).clamp(-448, 448).to(torch.float8_e4m3fn)
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    gate_up_scale = torch.rand(len(counts), 2 * inner // 128, hidden // 128) * 0.02
    down_scale = torch.rand(len(counts), hidden // 128, inner // 128) * 0.02
    weights = torch.rand(tokens, 2)
    given = (x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    assert error(experts_fp8_many.experts_many(*given), experts_fp8(*given).double()) < 1e-2
