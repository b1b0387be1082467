"""Head products and head weights: what they compile to, and results on a GPU."""

from functools import partial

import pytest
import torch
from torch import Tensor

from dsa_compile.ops import REFERENCE
from dsa_compile.ops.quantize import dequantize_blocks
from tests.kernels.compile_only import compiling_for, inspect

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("triton")

from dsa_compile.kernels import absorb  # noqa: E402
from dsa_compile.kernels.cuda import (  # noqa: E402
    attention_expand,
    head_products,
    head_weights,
    router,
)
from dsa_compile.kernels.cuda.compiler import build  # noqa: E402
from dsa_compile.kernels.triton import head_weights as triton_head_weights  # noqa: E402

SOURCES = {
    "absorb_rope_query.cu": {},
    "absorb_rope_query.cu of GLM-5": {"ROWS": 192},
    "expand_output_quantize.cu": {},
    "mla_decode_expand.cu": {"FORMAT": 0, "MOST_PARTS": attention_expand.MOST_PARTS},
    "head_weights.cu": {"CHUNKS": 7},
    "router.cu": {"CHUNKS": 7, "LANE_EXPERTS": 8},
}
needs_gpu = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_spills(source: str, arch: str) -> None:
    file = source.split()[0]
    binary = inspect(file, build(file, arch=arch, defines=SOURCES[source]))
    assert binary.local_bytes == 0
    if source in ("head_weights.cu", "router.cu"):
        assert "LDG.E.128" in binary.sass
        return
    tokens = "UBLKCP" if source == "mla_decode_expand.cu" else "LDGSTS.E.BYPASS.128"
    for instruction in ("UTMALDG.2D", "LDSM.16", "HMMA.16816.F32.BF16", tokens):
        assert instruction in binary.sass, instruction
    matrix, wait, _ = binary.sass.partition("ACQBULK")
    assert wait
    assert matrix.count("UTMALDG.2D") == 8, "the whole matrix is asked for ahead of the wait"


@pytest.mark.parametrize("width", [head_products.ROWS, head_products.COLUMNS])
def test_a_matrix_and_its_tokens_fit(width: int) -> None:
    assert head_products.shared_bytes(width) + 4096 <= 227 * 1024


def test_a_matrix_of_glm_and_its_tokens_fit() -> None:
    assert head_products.shared_bytes(192, 192) + 4096 <= 227 * 1024


def test_a_matrix_and_all_parts_fit() -> None:
    assert attention_expand.shared_bytes() + 4096 <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_triton_compiles_without_spills(capability: int) -> None:
    with compiling_for(capability) as found:
        for tokens, dtype in ((4096, torch.bfloat16), (70, torch.float32)):
            x = torch.empty(tokens, 7168, dtype=dtype, device="meta")
            triton_head_weights.index_head_weights(x, torch.empty(64, 7168, device="meta"), 0.1)
    assert len(found) == 4
    for binary in found:
        assert binary.local_bytes == 0, binary.name
        assert binary.shared_bytes <= 227 * 1024


@pytest.fixture
def poisoned():
    """``torch.empty`` gives NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm()) if want.numel() else 0.0


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("module", [head_products, absorb], ids=["cuda", "torch"])
def test_products_on_the_gpu(poisoned, tokens: int, heads: int, module) -> None:
    q, o = bf16(tokens, heads, 192), bf16(tokens, heads, 512)
    w_uk, w_uv = bf16(heads, 128, 512), bf16(heads, 128, 512)
    tables = bf16(tokens, 200)[:, :64], bf16(tokens, 200)[:, 64:128]  # rows apart
    q_latent, q_pe = module.absorb_rope_query(q, w_uk, *tables)
    want = torch.einsum("thd,hdr->thr", q[..., :128].double(), w_uk.double())
    assert error(q_latent, want) < 3e-3
    rotated = REFERENCE[torch.ops.dsa.rope_interleaved.default](q[..., 128:], *tables)
    assert torch.equal(q_pe, rotated)
    for ue8m0 in (True, False):
        codes, scale = module.expand_output_quantize(o, w_uv, ue8m0)
        reference = REFERENCE[torch.ops.dsa.expand_output_quantize.default](o, w_uv, ue8m0)
        want = torch.einsum("thr,hvr->thv", o.double(), w_uv.double()).flatten(1)
        ours, theirs = (
            error(dequantize_blocks(codes, scale), want),
            error(dequantize_blocks(*reference), want),
        )
        assert ours <= 1.01 * theirs
        again = module.expand_output_quantize(o, w_uv, ue8m0)
        assert torch.equal(codes.view(torch.uint8), again[0].view(torch.uint8))


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("module", [head_products, absorb], ids=["cuda", "torch"])
def test_absorption_of_glm_on_the_gpu(poisoned, tokens: int, module) -> None:
    q, w_uk = bf16(tokens, 64, 256), bf16(64, 192, 512)
    tables = bf16(tokens, 200)[:, :64], bf16(tokens, 200)[:, 64:128]  # rows apart
    q_latent, q_pe = module.absorb_rope_query(q, w_uk, *tables)
    want = torch.einsum("thd,hdr->thr", q[..., :192].double(), w_uk.double())
    assert error(q_latent, want) < 3e-3
    rotated = REFERENCE[torch.ops.dsa.rope_interleaved.default](q[..., 192:], *tables)
    assert torch.equal(q_pe, rotated)


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("module", [head_products, absorb], ids=["cuda", "torch"])
def test_heads_of_256_values_on_the_gpu(poisoned, tokens: int, module) -> None:
    o, w_uv = bf16(tokens, 64, 512), bf16(64, 256, 512)
    want = torch.einsum("thr,hvr->thv", o.double(), w_uv.double()).flatten(1)
    for ue8m0 in (True, False):
        reference = REFERENCE[torch.ops.dsa.expand_output_quantize.default](o, w_uv, ue8m0)
        ours = dequantize_blocks(*module.expand_output_quantize(o, w_uv, ue8m0))
        assert error(ours, want) <= 1.01 * error(dequantize_blocks(*reference), want)


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 6, 70, 300])
@pytest.mark.parametrize("module", [head_weights, triton_head_weights], ids=["cuda", "triton"])
def test_head_weights_on_the_gpu(poisoned, tokens: int, module) -> None:
    x, weight = bf16(tokens, 7168 + 8)[:, :7168], torch.randn(64, 7168, device="cuda")
    want = x.double() @ weight.double().T * 0.125
    assert error(module.index_head_weights(x, weight, 0.125), want) < 2e-6


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 6, 33])
def test_router_on_the_gpu(poisoned, tokens: int) -> None:
    x, weight = bf16(tokens, 7168), bf16(256, 7168) * 0.02
    bias = torch.rand(256, device="cuda")
    call = partial(router.router, x, weight, bias, 8, 4, 8, True, 2.5, 1)
    weights, indices = call()
    want_weights, want = REFERENCE[torch.ops.dsa.router.default](
        x, weight, bias, 8, 4, 8, True, 2.5, 1
    )
    indices, order = indices.sort(-1)
    want, want_order = want.sort(-1)
    assert torch.equal(indices, want)  # no ties at this seed
    torch.testing.assert_close(
        weights.gather(1, order), want_weights.gather(1, want_order), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(call()[0], weights)
