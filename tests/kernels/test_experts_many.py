"""The FP8 experts' kernels for many rows: what they compile to, and which calls they take."""

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch

from dsa_compile.kernels.cuda import experts_fp8_many as many
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.launch import CudaKernel

triton = pytest.importorskip("triton")

SHARED_LIMIT = 227 * 1024


def compiled(kernel: CudaKernel) -> tuple[str, dict[str, int]]:
    """SASS and use of registers, stack and local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(build(kernel.source, arch="sm_90a", defines=kernel.defines))
        file.flush()
        command = [tool, "-sass", "--dump-resource-usage", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.findall(rf"{kernel.name}:\n.*?(REG:.*)", sass)[0]
    return sass, {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


@pytest.mark.parametrize(("hidden", "inner"), [(7168, 2048), (7168, 256)])
def test_main_kernel_compiles_to_shared_copies_without_spills(hidden: int, inner: int) -> None:
    kernel = many.main_kernel(hidden, inner)
    sass, used = compiled(kernel)
    assert kernel.shared <= SHARED_LIMIT
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    assert used["REG"] == 168, "384 threads of one block take all registers"
    assert "UTMALDG.2D.MULTICAST" in sass, "blocks of a cluster share a tile of the weight"
    assert "UBLKCP.S.G.MULTICAST" in sass, "and rows"
    assert "STSM.16.M88.4" in sass
    products = sass.count("QGMMA.64x128x32.F32.E4M3.E4M3")
    assert products == 24, "two boxes or one, of both projections; four of 32 of K each"
    # four in a row for each wait: ptxas has not serialised them
    assert products == 4 * sass.count("WARPGROUP.DEPBAR")


@pytest.mark.parametrize("name", ["count", "place", "gather"])
def test_rows_kernels_compile(name: str) -> None:
    _, used = compiled(getattr(many.row_kernels(256, 7168, 8, torch.int64), name))
    assert used["STACK"] == used["LOCAL"] == 0


@pytest.mark.parametrize(
    ("hidden", "inner", "taken"),
    [(7168, 2048, True), (512, 256, True), (768, 256, False), (512, 384, False)],
)
def test_takes_tiles_in_twos(hidden: int, inner: int, taken: bool) -> None:
    assert many.takes(hidden, inner) is taken
