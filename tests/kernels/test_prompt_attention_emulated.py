"""Attention of prompts by warpgroups on the CPU, a thread for a thread."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")
pytest.importorskip("triton")

from dsa_compile.kernels.cuda import prompt_attention
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.ops import prompt_attention as ops
from tests.kernels import emulator
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

HEADS, LATENT, SCALE = 2, 32, 0.09
WRITTEN_OUT = (
    *("await", "power_of_two", "scaled_pair", "descriptor", "fence_registers"),
    *("wgmma_64x64_ss", "wgmma_64x64_rs", "wgmma_64x128_ss"),
    *("wgmma_64x128_transposed_ss", "wgmma_64x128_rs"),
)
"""Functions that ``warpgroup_emulator.h`` has in place of the sources', or that nothing calls."""


class TensorMap(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 3),
        ("strides", ctypes.c_longlong * 3),
        ("box", ctypes.c_int * 3),
    )


def tensor_map(tensor: torch.Tensor, box) -> TensorMap:
    """A map as the emulator takes it, innermost dimension first."""
    missing = 3 - tensor.dim()
    sizes = [*reversed(tensor.shape), *[1] * missing]
    strides = [2 * stride for stride in (*reversed(tensor.stride()), *[0] * missing)]
    boxes = [*reversed(box), *[1] * missing]
    return TensorMap(
        tensor.data_ptr(),
        (ctypes.c_longlong * 3)(*sizes),
        (ctypes.c_longlong * 3)(*strides),
        (ctypes.c_int * 3)(*boxes),
    )


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulator.use_headers(monkeypatch, tmp_path, "products_in_flight.h", "warpgroup_emulator.h")
    usual = emulator._portable

    def portable(text: str) -> str:
        text = emulator.without(text, WRITTEN_OUT)
        text = re.sub(r"#define MINUS_INFINITY .*", "", text)
        return usual(
            text.replace(
                "extern __shared__ __align__(1024) u8 shared[];", "u8* shared = dynamic_memory();"
            )
        )

    monkeypatch.setattr(emulator, "_portable", portable)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    monkeypatch.setattr(prompt_attention, "tensor_map", tensor_map)
    monkeypatch.setattr(prompt_attention, "multiprocessors", lambda device: 2)
    torch.manual_seed(0)


class Selected:
    """Stands in for the kernel that makes bits."""

    def __init__(self, slots, slot_mapping, positions):
        cache = torch.empty(1, 4096)
        self._unseen = ops._Unseen(cache, slot_mapping, positions, slots)
        self.tokens = len(slot_mapping)

    def parts(self, queries):
        assert queries == 128
        for start in range(0, self.tokens, 2 * queries):
            stop = min(start + 2 * queries, self.tokens)
            words = -(-stop // 128) * 4
            seen = torch.nn.functional.pad(~self._unseen.of(start, stop), (0, 32 * words - stop))
            weights = 2 ** torch.arange(32)
            packed = (seen.view(-1, words, 32) * weights).sum(-1)
            yield start, stop, packed.to(torch.int32)


@pytest.mark.parametrize(
    ("lengths", "padding", "selects", "wrong"),
    quick_first(
        [
            ([100, 1, 210], 9, 60, 150),
            ([300], 3, None, None),
            ([5, 150, 3, 120], 20, None, 100),
            ([128], 0, 3, None),
            ([513], 0, 100, None),
            ([1], 0, None, None),
        ]
    ),
    ids=str,
)
def test_as_the_reference(lengths, padding, selects, wrong):
    """Also with a token, ``wrong``, whose row has a NaN."""
    slots = torch.randperm(4096)[: sum(lengths)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    pad = torch.nn.functional.pad
    slots, positions = pad(slots, (0, padding), value=-1), pad(positions, (0, padding))
    tokens = len(slots)
    q = torch.randn(tokens, HEADS, 192).bfloat16()
    pe = torch.randn(HEADS, tokens, 64).bfloat16().transpose(0, 1)
    rows = torch.randn(tokens, LATENT + 64)
    rows[:, LATENT:] *= torch.linspace(0.1, 8, tokens)[:, None]  # results so far must shrink
    rows = rows.bfloat16()
    rows[slots < 0] = 0
    if wrong is not None:
        rows[wrong, 7] = torch.nan
    latents = rows[:, :LATENT].float()
    w_uk, w_uv = (torch.randn(HEADS, 128, LATENT) / 6 for _ in range(2))
    k, v = (
        (of @ w.flatten(0, 1).t()).bfloat16()
        for of, w in ((latents, w_uk), (ops.finite_latents(latents), w_uv))
    )
    chosen, selected = None, None
    if selects is not None:
        chosen = slots[torch.randint(tokens, (tokens, selects))].int()
        chosen[2::7] = -1  # tokens that select nothing
        selected = Selected(chosen, slots, positions)
    given = (q[..., :128], pe, k, rows, v, slots, positions, SCALE)
    got = prompt_attention.attend_heads(*given, selected=selected).float()
    cache = torch.zeros(1, 4096, LATENT + 64)
    cache[0, slots[slots >= 0]] = rows[slots >= 0].float()
    exact = [each.float() for each in (q[..., :128], pe)]
    unseen = ops._Unseen(cache, slots, positions, chosen)
    wanted = ops._attend(*exact, rows.float(), unseen, w_uk, w_uv, SCALE)
    assert torch.equal((got == 0).all(2), (wanted == 0).all(2))
    assert torch.equal(got.isnan(), wanted.isnan())
    assert wanted.isnan().any() == (wrong is not None)
    got, wanted = got.nan_to_num(), wanted.nan_to_num()
    assert (got - wanted).norm() < 8e-3 * wanted.norm()
    apart = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1).clamp(min=1e-6)
    assert apart.max() < 3e-2


def test_a_step_without_tokens_launches_nothing(monkeypatch):
    monkeypatch.setattr(CudaKernel, "__call__", None)
    nothing = torch.empty(0, dtype=torch.int64)
    q, rows = torch.empty(0, HEADS, 192).bfloat16(), torch.empty(0, LATENT + 64).bfloat16()
    k = torch.empty(0, HEADS * 128).bfloat16()
    given = (q[..., :128], q[..., 128:], k, rows, k, nothing, nothing, SCALE)
    assert prompt_attention.attend_heads(*given).shape == (0, HEADS, 128)
