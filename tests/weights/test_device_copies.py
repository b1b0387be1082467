"""Tensors of files, read in slabs by several threads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.device_copies import DeviceCopies
from dsa_compile.weights.safetensors_file import SafetensorsFile

CPU = torch.device("cpu")


def saved(path: Path, **tensors: torch.Tensor) -> SafetensorsFile:
    save_file(tensors, path)
    return SafetensorsFile.open(path, ArtifactError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1,), (7, 11), (3, 5, 13), (64, 64)])
def test_every_slab_arrives(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    wanted = torch.randn(shape).to(dtype)
    file = saved(tmp_path / "w.safetensors", a=torch.zeros(3), w=wanted)
    out = torch.full(shape, 9.0).to(dtype)
    DeviceCopies(CPU, slab=64).read(file, "w", out)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", w=torch.ones(1000))
    with file.path.open("r+b") as opened:
        opened.truncate(file.size - 4)
    with pytest.raises(ArtifactError, match="truncated while reading 'w'"):
        DeviceCopies(CPU, slab=256).read(file, "w", torch.empty(1000))


@pytest.mark.gpu
def test_onto_a_gpu(tmp_path: Path) -> None:
    """Into memory that was another tensor's a moment ago, and that is used at once."""
    wanted = torch.randint(0, 256, (250_000_001,), dtype=torch.uint8)
    file = saved(tmp_path / "w.safetensors", w=wanted)
    copies = DeviceCopies(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        busy = torch.zeros(len(wanted), dtype=torch.uint8, device="cuda")
        for _ in range(20):
            busy += 1
        del busy
        out = torch.empty(len(wanted), dtype=torch.uint8, device="cuda")
        copies.read(file, "w", out)
        assert torch.equal((out ^ 1).cpu(), wanted ^ 1)
