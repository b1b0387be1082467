"""Experts and router: the FP8 reference, checks of the kernels run apart, what they compile to."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
import torch.nn.functional as F

from dsa_compile.kernels.cuda import experts_fp8 as cuda_experts
from dsa_compile.kernels.cuda import experts_fp8_one as one
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.registry import load
from dsa_compile.ops.experts_fp8 import experts_fp8
from dsa_compile.ops.quantize import quantize_blocks

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024
E4M3 = torch.float8_e4m3fn

COMPILE = """
import json, sys
import torch
from dsa_compile.kernels.triton import experts, router
from tests.kernels.compile_only import compiling_for

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

f8, f32 = torch.float8_e4m3fn, torch.float32
with compiling_for(int(sys.argv[1])) as found:
    for tokens in (1, 4096):
        choice = empty(tokens, 8, dtype=f32), empty(tokens, 8, dtype=torch.int64)
        experts.experts(empty(tokens, 7168), *choice, empty(256, 4096, 7168),
                        empty(256, 7168, 2048))
        experts.experts_fp8(
            empty(tokens, 7168, dtype=f8), empty(tokens, 56, dtype=f32), *choice,
            empty(256, 4096, 7168, dtype=f8), empty(256, 32, 56, dtype=f32),
            empty(256, 7168, 2048, dtype=f8), empty(256, 56, 16, dtype=f32))
        router.router(empty(tokens, 7168), empty(256, 7168), empty(256, dtype=f32),
                      8, 4, 8, True, 2.5)
print(json.dumps([vars(binary) for binary in found]))
"""


def arguments(tokens=5, experts=3, hidden=256, inner=128, top_k=2):
    x, x_scale = quantize_blocks(torch.randn(tokens, hidden), False)
    return [
        x,
        x_scale,
        torch.rand(tokens, top_k),
        torch.randint(-1, experts + 1, (tokens, top_k)),
        (torch.randn(experts, 2 * inner, hidden) * 50).to(E4M3),
        torch.rand(experts, 2 * -(-inner // 128), -(-hidden // 128)) * 1e-3,
        (torch.randn(experts, hidden, inner) * 50).to(E4M3),
        torch.rand(experts, -(-hidden // 128), -(-inner // 128)) * 1e-3,
    ]


def wide(q, scale):
    """fp64 values of quantised rows, or of a matrix quantised in blocks of 128×128."""
    spread = scale.double().repeat_interleave(128, -1)[..., : q.shape[1]]
    if spread.shape != q.shape:
        spread = spread.repeat_interleave(128, 0)[: q.shape[0]]
    return q.double() * spread


@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (200, 96)])
def test_reference_is_the_formula(hidden, inner):
    args = arguments(hidden=hidden, inner=inner)
    x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale = args
    want = torch.zeros(x.shape, dtype=torch.float64)
    for t, s in itertools.product(range(5), range(2)):
        e = int(indices[t, s])
        if 0 <= e < 3:
            scales = gate_up_scale[e].chunk(2)
            gate, up = (
                wide(part, scale) @ wide(x[t : t + 1], x_scale[t : t + 1])[0]
                for part, scale in zip(gate_up[e].chunk(2), scales, strict=True)
            )
            q, scale = quantize_blocks((F.silu(gate) * up).float().unsqueeze(0), False)
            want[t] += weights[t, s] * (wide(down[e], down_scale[e]) @ wide(q, scale)[0])
    got = experts_fp8(*args)
    assert got.dtype is torch.bfloat16
    assert ((got.double() - want).norm() / want.norm()).item() < 4e-3


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda t: t.float(), "x as float8_e4m3fn"),
        (0, lambda t: t[:, :200], r"x_scale as .* H = 200 as in x|gate_up as .* H = 200 as in x"),
        (1, lambda t: t[:, :1], r"x_scale as float32.* H = 256 as in x, not float32\[5, 1\]"),
        (2, lambda t: t.bfloat16(), "weights as float32"),
        (3, lambda t: t.short(), "indices as int32 or int64"),
        (4, lambda t: t[:, :128], r"gate_up as .* not float8_e4m3fn\[3, 128, 256\]"),
        (7, lambda t: t.half(), "down_scale as float32"),
    ],
)
def test_bad_input(place, change, message):
    args = arguments()
    args[place] = change(args[place])
    for implementation in (torch.ops.dsa.experts_fp8, load("experts_fp8", "cuda", "sm_90a")):
        with pytest.raises(ValueError, match=f"dsa::experts_fp8 takes .*{message}"):
            implementation(*args)


def run(*command: str, **environment: str) -> str:
    """Output of a Python process: the interpreter is chosen when triton is imported."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


CHECKS = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels/experts_checks.py")
SHAPE_CHECKS = "tests/kernels/experts_shape_checks.py"


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    run(*CHECKS, TRITON_INTERPRET="1")


@pytest.mark.gpu(alone=True)
def test_on_the_gpu() -> None:
    run(*CHECKS, SHAPE_CHECKS, TRITON_INTERPRET="0")


SHAPES = {name: getattr(cuda_experts, name) for name in ("ONE", "FEW", "STREAM", "WIDE")}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_triton_compiles_without_spills(capability: int) -> None:
    kernels = json.loads(run("-c", COMPILE, str(capability), TRITON_INTERPRET="0"))
    for kernel in kernels:
        assert kernel["local_bytes"] == 0, kernel["name"]
        assert kernel["shared_bytes"] <= SHARED_LIMIT, kernel["name"]
    products = [k for k in kernels if re.search("gate_up|down|product", k["name"])]
    assert len(products) == 10
    # bf16 and FP8 products of many rows, and every product of the router
    wide_product = {90: "HGMMA|QGMMA", 100: "UTCHMMA|UTCQMMA"}[capability]
    assert sum(bool(re.search(wide_product, k["sass"])) for k in products) == 6


@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "taken"),
    [
        (7168, 256, 9, True),  # a rank of eight
        (7168, 512, 9, True),  # of four
        (7168, 1024, 9, True),  # of two
        (7168, 1152, 9, False),
        (7168, 2048, 9, False),  # wide: a token has the same bits in every batch
        (512, 256, 2, False),  # nothing to share K of
        (7168 + 128, 256, 9, False),
        (6144, 128, 33, False),  # more than a warp lists
    ],
)
def test_one_launch_is_for_narrow_experts(hidden, inner, top_k, taken) -> None:
    assert cuda_experts._in_one_launch(hidden, inner, top_k, 132) is taken


@pytest.mark.slow
@pytest.mark.parametrize("inner", [256, 512, 1024])
@pytest.mark.parametrize(("arch", "processors"), [("sm_90a", 132), ("sm_100a", 148)])
def test_one_launch_keeps_all_in_registers(arch: str, processors: int, inner: int) -> None:
    shape = one.Shape(7168, inner, 9, processors)
    assert shape.fits
    defines = shape.defines(257, torch.int64)
    sass, used = inspect(build("experts_fp8_one.cu", arch=arch, defines=defines))
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    assert 32 * shape.warps * used["REG"] <= 48 * 1024, "what follows finds no registers"
    assert "LDGSTS.E.BYPASS.LTC128B.128" in sass
    assert "HMMA.16816.F32" in sass  # e4m3 as fp16, exact in it
    assert instructions(sass) < 2048, "instructions come from memory at every layer"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_choice_of_experts_has_few_instructions(arch: str) -> None:
    defines = {"CHUNKS": 7, "LANE_EXPERTS": 8}
    sass, used = inspect(build("router.cu", arch=arch, defines=defines))
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    choice = re.search(r"Function : router_choice(.*?)(Function : |\Z)", sass, re.DOTALL)
    assert choice is not None
    assert instructions(choice[1]) < 640, "instructions come from memory at every layer"


def test_items_share_k_where_they_would_leave_multiprocessors_idle() -> None:
    """A rank of eight has experts 256 wide: nine of a token are 18 items of 56 blocks of K."""
    parts = [cuda_experts.parts_of_k(9 * tokens, 2, 56, 132) for tokens in (1, 2, 3, 4, 8)]
    assert parts == [8, 4, 2, 2, 1]
    parts = [cuda_experts.parts_of_k(9 * tokens, 4, 56, 132) for tokens in (1, 2, 3, 4)]
    assert parts == [4, 2, 1, 1]
    assert cuda_experts.parts_of_k(1, 1, 56, 132) == 14, "a part has four blocks or more"
    assert cuda_experts.parts_of_k(2, 2, 4, 132) == cuda_experts.parts_of_k(2, 2, 3, 132) == 1
    assert cuda_experts.FEW.parted(256, 9)
    assert not cuda_experts.FEW.parted(2048, 9)
    assert not cuda_experts.STREAM.parted(256, 9)


@pytest.mark.parametrize(
    ("experts", "inner", "top_k", "last"),
    [
        (256, 2048, 8, {"ONE": 1, "FEW": 2, "STREAM": 384, "WIDE": 1536}),
        (257, 2048, 9, {"FEW": 1, "STREAM": 342, "WIDE": 1370}),  # 144 items for 132
        (32, 2048, 8, {"ONE": 1, "FEW": 2, "STREAM": 48, "WIDE": 192}),  # 32 of 256 are here
        (257, 256, 9, {"FEW": 14, "STREAM": 342, "WIDE": 1370}),  # an eighth of each
    ],
)
def test_the_shape_follows_from_the_number_of_tokens(experts, inner, top_k, last) -> None:
    found = {}
    for tokens in range(1, last["WIDE"] + 1):
        shape = cuda_experts._shape(tokens * top_k, experts, inner, top_k, 132)
        found[next(name for name in SHAPES if SHAPES[name] == shape)] = tokens
    assert found == last


@pytest.mark.slow
@pytest.mark.parametrize("inner", [256, 2048])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cuda_compiles_to_tensor_cores_and_bulk_copies(
    shape: cuda_experts.Shape, inner: int
) -> None:
    # every block takes 1 KB for the system, and one may have all the rest
    assert shape.blocks * (shape.shared_bytes() + 1024) <= SHARED_LIMIT + 1024
    defines = shape.defines(7168, inner, 8)
    sass, used = inspect(build("experts_fp8.cu", arch="sm_90a", defines=defines))
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    assert used["REG"] == {1: 168, 2: 80}[shape.blocks], "384 threads a block take all registers"
    assert "UTMALDG.2D" in sass
    assert "LDGSTS.E.BYPASS.128" in sass, "rows are gathered 16 bytes a thread"
    assert "STSM.16.MT88" in sass
    assert ("ATOMG.E.ADD" in sass) == (shape.claimed or shape.parted(inner, 8))
    # four in a row for each wait: ptxas has not serialised them
    assert sass.count("QGMMA.64x") == 4 * sass.count("WARPGROUP.DEPBAR") > 0


def inspect(cubin: bytes) -> tuple[str, dict[str, int]]:
    """SASS and use of registers, stack and local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True).stdout
            for flag in ("-sass", "--dump-resource-usage")
        )
    return sass, {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def instructions(sass: str) -> int:
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))


@pytest.mark.parametrize("index", ["int", "long long"])
def test_cuda_small_kernels_compile(index: str) -> None:
    common = {"INDEX": index, "EXPERTS": 256}
    few = common | {"TOKENS": 32, "COUNTERS": 3}
    plan = build("experts_fp8_plan.cu", arch="sm_90a", defines=few)
    combine = build(
        "experts_fp8_combine.cu", arch="sm_90a", defines=common | {"TOP_K": 8, "HIDDEN": 7168}
    )
    for cubin in (plan, combine):
        _, used = inspect(cubin)
        assert used["STACK"] == used["LOCAL"] == 0
