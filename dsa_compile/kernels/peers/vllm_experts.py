"""vLLM's Triton experts in block FP8, for comparison only: they come with an engine.

The module launches what vLLM's ``TritonExperts`` launches for operands that are quantised already:
the order of pairs, the first product, activation with quantisation, the second product with the
routing weights, the sum. vLLM's file ``fused_moe.py`` is run as it is, with the sizes of blocks
that it chooses: from the file that vLLM has for a number of experts, a width and a GPU, or by its
rule if it has none.
"""

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.peers import vllm_files
from dsa_compile.ops.quantize import E4M3

BLOCK = [128, 128]
_PACKAGE = "vllm.model_executor.layers.fused_moe"
_DTYPE = "fp8_w8a8"


class _Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def _capability(wanted: int) -> bool:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor == wanted


def _align(*operands: Any) -> None:
    vllm_files.library("_moe_C").moe_align_block_size(*operands)


@functools.cache
def module() -> ModuleType:
    """``fused_moe.py``, run by itself.

    Raises:
        ModuleNotFoundError: vLLM is not installed, or has no such file.
    """
    platform = SimpleNamespace(
        is_rocm=lambda: False,
        is_cuda_alike=lambda: True,
        is_device_capability=_capability,
        get_device_name=lambda: torch.cuda.get_device_name(),
        fp8_dtype=lambda: E4M3,
        simple_compile_backend="inductor",
    )
    given: dict[str, dict[str, Any]] = {
        "vllm": {"_custom_ops": SimpleNamespace(moe_align_block_size=_align)},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.logger": {"init_logger": lambda name: _Quiet()},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda *args, **options: None},
    }
    beside = (f"{_PACKAGE}.{name}" for name in ("activation", "moe_align_block_size", "utils"))
    real = (*beside, "vllm.utils.math_utils")
    return vllm_files.load(f"{_PACKAGE}.fused_moe", real, given)


def load() -> None:
    """Make all ready that :func:`experts_fp8` calls.

    Raises:
        ModuleNotFoundError: vLLM is not installed, or a file or a library of it is missing.
    """
    module()
    for name in ("_C", "_moe_C"):
        vllm_files.library(name)


def tuned(experts: int, inner: int) -> bool:
    """Whether vLLM has a file of block sizes for these experts on this GPU."""
    return module().get_moe_configs(experts, inner, _DTYPE, *BLOCK) is not None


@functools.cache
def block_sizes(tokens: int, experts: int, inner: int, hidden: int, top_k: int) -> dict[str, int]:
    """Arguments of the kernel, as vLLM's ``try_get_optimal_moe_config`` chooses them."""
    own = module()
    files = own.get_moe_configs(experts, inner, _DTYPE, *BLOCK)
    if files:
        nearest: dict[str, int] = files[min(files, key=lambda count: abs(count - tokens))]
        return nearest
    chosen: dict[str, int] = own.get_default_config(
        tokens, experts, inner, hidden, top_k, _DTYPE, BLOCK
    )
    return chosen


def experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    expert_map: Tensor | None = None,
) -> Tensor:
    """``dsa::experts_fp8``; gate, up and an expert's output are rounded to bf16.

    Args:
        x: e4m3 ``[N, H]``.
        x_scale: fp32 ``[N, H/128]``.
        weights: fp32 ``[N, k]``.
        indices: int32 ``[N, k]``, below the number of all experts.
        gate_up: e4m3 ``[E, 2I, H]``, gate rows first.
        gate_up_scale: fp32 ``[E, 2I/128, H/128]``.
        down: e4m3 ``[E, H, I]``.
        down_scale: fp32 ``[E, H/128, I/128]``.
        expert_map: int32, for each of all experts its place in ``gate_up`` or -1; None: all are.

    Returns:
        bf16 ``[N, H]``.
    """
    own = module()
    tokens, top_k = indices.shape
    experts, hidden, inner = down.shape
    sizes = block_sizes(tokens, experts, inner, hidden, top_k)
    count = experts if expert_map is None else len(expert_map)
    placed = own._prepare_expert_assignment(indices, sizes, tokens, top_k, count, expert_map)

    def product(a: Tensor, scale: Tensor, b: Tensor, b_scale: Tensor, weighted: bool) -> Tensor:
        out = torch.empty(tokens, top_k, b.shape[1], dtype=torch.bfloat16, device=a.device)
        own.invoke_fused_moe_triton_kernel(
            a, b, out, scale, b_scale, weights if weighted else None, *placed, weighted,
            1 if weighted else top_k, sizes, compute_type=tl.bfloat16, use_fp8_w8a8=True,
            use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False,
            per_channel_quant=False, block_shape=BLOCK,
        )  # fmt: skip
        return out

    wide = product(x, x_scale, gate_up, gate_up_scale, False)
    q, q_scale = _activate(wide.view(-1, 2 * inner))
    made = product(q, q_scale, down, down_scale, True)
    return _sum(made)


def _activate(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = gate_up.shape
    q = torch.empty(rows, width // 2, dtype=E4M3, device=gate_up.device)
    scale = torch.empty(rows, width // 256, device=gate_up.device)
    vllm_files.library("_C").silu_and_mul_per_block_quant(q, gate_up, scale, 128, None, False)
    return q, scale


def _sum(made: Tensor) -> Tensor:
    out = torch.empty(made.shape[0], made.shape[2], dtype=made.dtype, device=made.device)
    vllm_files.library("_moe_C").moe_sum(made, out)
    return out
