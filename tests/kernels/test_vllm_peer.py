"""vLLM's files run by themselves, and its experts' launches; without a GPU, and without vLLM."""

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from dsa_compile.kernels.peers import vllm_experts, vllm_files
from dsa_compile.ops.experts_fp8 import experts_fp8 as reference
from dsa_compile.ops.quantize import E4M3, quantize_blocks

EXPERTS, HIDDEN, INNER, TOP_K = 8, 256, 128, 2
TOLERANCE = 0.1
"""Gate and up rounded to bf16 move some of so few values by a step of e4m3: up to 4e-2. Operands in
the wrong order, or without a scale or a weight, make more than 0.4."""
FUSED_MOE = """
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.activation import NAME
from vllm.model_executor.layers.fused_moe.config import Config
from vllm.platforms import current_platform

def annotated(config: Config | None = None) -> Config:
    return Config()

def get_moe_configs(experts, inner, dtype, block_n, block_k):
    return {1: {"BLOCK_SIZE_M": 16}, 64: {"BLOCK_SIZE_M": 64}} if experts == 4 else None

def get_default_config(tokens, experts, inner, hidden, top_k, dtype, block_shape):
    return {"BLOCK_SIZE_M": 8}

def _prepare_expert_assignment(ids, config, tokens, top_k, experts, expert_map):
    assert expert_map is None or len(expert_map) == experts
    return ids, expert_map, None

def invoke_fused_moe_triton_kernel(
    A, B, C, A_scale, B_scale, topk_weights, ids, expert_map, _, mul_routed_weight, top_k, config,
    *, compute_type, use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16,
    per_channel_quant, block_shape,
):
    def wide(values, scale, rows):
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)
        return values.float() * scale
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert_map is not None:
                expert = int(expert_map[expert])
            if expert < 0:
                C[token, slot] = 0
                continue
            row = (token * ids.shape[1] + slot) // top_k
            out = wide(B[expert], B_scale[expert], 128) @ wide(A, A_scale, 1)[row]
            C[token, slot] = out * (topk_weights[token, slot] if mul_routed_weight else 1)
"""


class Operators:
    """Operators of vLLM's libraries, in torch."""

    def silu_and_mul_per_block_quant(
        self, q: Tensor, gate_up: Tensor, scale: Tensor, *_: object
    ) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        for target, made in zip((q, scale), quantize_blocks(F.silu(gate) * up, False), strict=True):
            target.copy_(made)

    def moe_sum(self, made: Tensor, out: Tensor) -> None:
        out.copy_(made.float().sum(1))

    def moe_align_block_size(
        self, ids: Tensor, experts: int, size: int, rows: Tensor, blocks: Tensor, end: Tensor,
        *_: object,
    ) -> None:  # fmt: skip
        flat = ids.flatten()
        blocks.zero_()
        placed: list[int] = []
        for expert in range(experts):
            mine = (flat == expert).nonzero().flatten().tolist()
            blocks[len(placed) // size : (len(placed) + len(mine) + size - 1) // size] = expert
            placed += mine + [flat.numel()] * (-len(mine) % size)
        rows.fill_(flat.numel())[: len(placed)] = torch.tensor(placed, dtype=torch.int32)
        end.fill_(len(placed))


def clear() -> None:
    for cached in (vllm_files.folder, vllm_experts.module, vllm_experts.block_sizes):
        cached.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder ``vllm`` on the path with the files that the adapter runs."""
    folder = tmp_path / "vllm/model_executor/layers/fused_moe"
    folder.mkdir(parents=True)
    (folder / "fused_moe.py").write_text(FUSED_MOE)
    (folder / "activation.py").write_text("NAME = 'silu'\n")
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('the whole engine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_files, "library", lambda name: Operators())
    clear()
    yield folder
    clear()


def test_a_file_runs_without_the_engine(package: Path) -> None:
    own = vllm_experts.module()
    assert own.NAME == "silu", "from a file"
    assert own.current_platform.fp8_dtype() is E4M3, "given"
    with pytest.raises(RuntimeError, match=r"fused_moe.config.Config was called"):
        own.annotated()


def test_nothing_of_it_stays_and_nothing_is_lost(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = types.ModuleType("vllm.platforms")
    monkeypatch.setitem(sys.modules, "vllm.platforms", engine)
    finders = list(sys.meta_path)
    vllm_experts.module()
    assert [name for name in sys.modules if name.startswith("vllm")] == ["vllm.platforms"]
    assert sys.modules["vllm.platforms"] is engine
    assert sys.meta_path == finders


def test_a_file_that_is_not_there_is_told(package: Path) -> None:
    (package / "activation.py").unlink()
    with pytest.raises(ModuleNotFoundError, match=r"vllm has no activation.py"):
        vllm_experts.module()


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    clear()
    with pytest.raises(ModuleNotFoundError, match="vllm is not installed"):
        vllm_experts.load()
    clear()


def test_a_library_that_does_not_load_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setenv("VLLM_C_LIBRARY", str(broken))
    vllm_files.library.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="does not load"):
        vllm_files.library("_C")


def operands(tokens: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """x with scales, routing weights and choices; matrices with scales."""
    torch.manual_seed(tokens)

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(EXPERTS, rows, columns).mul_(60).clamp_(-448, 448).to(E4M3)
        return weight, torch.rand(EXPERTS, rows // 128, columns // 128).add_(0.5).mul_(3e-4)

    indices = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    x = quantize_blocks(torch.randn(tokens, HIDDEN), False)
    return (*x, torch.rand(tokens, TOP_K), indices), (
        *matrix(2 * INNER, HIDDEN), *matrix(HIDDEN, INNER),
    )  # fmt: skip


def compare(tokens: int) -> None:
    """All experts, then the latter half of them, as a rank that has those."""
    given, matrices = operands(tokens)
    want = reference(*given, *matrices).float()
    error = (vllm_experts.experts_fp8(*given, *matrices).float() - want).norm() / want.norm()
    assert error < TOLERANCE, f"{tokens} tokens: {error}"
    half = EXPERTS // 2
    places = torch.cat([torch.full((half,), -1), torch.arange(half)]).int()
    here = tuple(each[half:].contiguous() for each in matrices)
    want = reference(*given[:3], given[3] - half, *here).float()
    out = vllm_experts.experts_fp8(*given, *here, expert_map=places).float()
    assert want.norm() > 0
    error = (out - want).norm() / want.norm()
    assert error < TOLERANCE, f"{tokens} tokens, half of the experts: {error}"


def test_the_launches_make_the_op(package: Path) -> None:
    compare(5)


def test_block_sizes_are_of_the_nearest_number_of_tokens(package: Path) -> None:
    assert vllm_experts.tuned(4, 128)
    assert not vllm_experts.tuned(8, 128)
    sizes = [vllm_experts.block_sizes(n, 4, 128, 256, 2)["BLOCK_SIZE_M"] for n in (1, 30, 40, 900)]
    assert sizes == [16, 16, 64, 64]
    assert vllm_experts.block_sizes(30, 8, 128, 256, 2) == {"BLOCK_SIZE_M": 8}


INTERPRETED = """
import torch
from dsa_compile.kernels.peers import vllm_files
from tests.kernels import test_vllm_peer as here
vllm_files.library = lambda name: here.Operators()
torch.cuda.get_device_name = lambda: "NVIDIA H200"
torch.cuda.get_device_capability = lambda: (9, 0)
for tokens in (1, 3, 20):
    here.compare(tokens)
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's files are not there")
def test_vllms_own_kernel_in_tritons_interpreter() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
