"""Sum over ranks, then addition, norm and quantisation: a collective and Triton's kernel."""

from torch import Tensor

from dsa_compile.kernels.cuda.device import rehearsal
from dsa_compile.kernels.triton.norm_quantize import add_rms_norm_quantize
from dsa_compile.ops.collectives import all_reduce


def all_reduce_add_rms_norm_quantize(
    x: Tensor,
    axis: str,
    ranks: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dsa::all_reduce_add_rms_norm_quantize``."""
    total = x if rehearsal() else all_reduce(x, axis, ranks)
    return add_rms_norm_quantize(total, residual, weight, eps, ue8m0)
