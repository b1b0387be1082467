"""Machine code of CUDA kernels: written into artifacts, found on loading, never a stale one."""

from pathlib import Path

import pytest

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.kernels.cuda import compiler, parallel_build
from dsa_compile.kernels.cuda.compiler import KernelCompileError, cubin_name
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.parallel_build import build_each
from dsa_compile.kernels.cuda.shipped import ShippedKernels
from dsa_compile.lowering import compiled_kernels
from dsa_compile.lowering.compile_model import CompileResult, compile_model
from dsa_compile.lowering.compiled_kernels import ships_kernels, write_kernels
from examples.small_models.models import save_hf, tiny_config, tiny_model

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
KERNEL = CudaKernel("head_weights.cu", "head_weights", {"CHUNKS": 7})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    save_hf(tiny_model(tiny_config(num_hidden_layers=2)), path)
    return path


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of every program are the one that compiles fast, twice."""
    monkeypatch.setattr(compiled_kernels, "launched_kernels", lambda *_: (KERNEL, KERNEL))


def compiled(model_dir: Path, out: Path, **options: object) -> CompileResult:
    return compile_model(model_dir, out, target="sm_90a", recipe="fp32", force=True, **options)


def test_an_artifact_holds_what_its_steps_launch(model_dir, tmp_path, cheap):
    result = compiled(model_dir, tmp_path / "a")
    name = cubin_name(KERNEL.source, arch="sm_90a", defines=KERNEL.defines)
    listed = [f.path for f in result.manifest.files if f.path.startswith("kernels/")]
    assert listed == [f"kernels/{name}.cubin"]
    file = tmp_path / "a" / listed[0]
    code = file.read_bytes()
    assert code[:4] == b"\x7fELF"
    assert "kernels" in result.seconds

    another = file.with_name("another.cubin")
    another.write_bytes(code)
    with pytest.raises(ArtifactError, match=r"another\.cubin: not part of the artifact"):
        Artifact.open(tmp_path / "a")
    another.unlink()
    Artifact.open(tmp_path / "a")
    file.write_bytes(code[:-1] + bytes([code[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=name):
        Artifact.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("options", "ships"),
    [
        ({"target": "sm_100a", "weights": "pack"}, True),
        ({"target": "cpu"}, False),
        ({"target": "sm_90a", "compiled_kernels": False}, False),
        ({"target": "sm_90a", "weights": "none"}, True),
        ({"target": "sm_90a", "stop_after": "overlap_streams"}, False),
    ],
)
def test_artifacts_that_run_on_a_gpu_ship_kernels(options, ships):
    assert ships_kernels(CompileConfig(**options)) is ships


def test_without_nvrtc_the_artifact_says_so(model_dir, tmp_path, cheap, monkeypatch):
    def missing() -> None:
        raise UserError("the CUDA kernels need cuda-bindings and NVRTC: pip install it")

    monkeypatch.setattr(compiler, "_nvrtc", missing)
    compiler.nvrtc_version.cache_clear()
    try:
        result = compiled(model_dir, tmp_path / "a")
    finally:
        compiler.nvrtc_version.cache_clear()
    (note,) = (note for note in result.notes if "will be compiled on loading" in note)
    assert "pip install" in note


def test_a_kernel_is_compiled_by_a_process_of_its_own(tmp_path, monkeypatch):
    """As if by this one, and again by this one where the other failed."""
    monkeypatch.setenv("DSA_COMPILE_CACHE", str(tmp_path / "apart"))
    source = (KERNEL.source, {**KERNEL.defines, "CHUNKS": 6})
    with monkeypatch.context() as patch:
        patch.setattr(parallel_build, "build", None)
        ((name, apart),) = build_each([source, source], "sm_90a")
    assert name == cubin_name(source[0], arch="sm_90a", defines=source[1])
    monkeypatch.setenv("DSA_COMPILE_CACHE", str(tmp_path / "here"))
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "false")
        ((_, here),) = build_each([source], "sm_90a")
    assert here == apart


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_byte(tmp_path, monkeypatch, workers):
    monkeypatch.setenv("DSA_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parallel_build, "processors", lambda: workers)
    kernels = [CudaKernel(KERNEL.source, KERNEL.name, {"CHUNKS": n}) for n in (5, 6, 7)]
    (tmp_path / "made").mkdir()
    write_kernels(kernels, "sm_90a", tmp_path / "made")
    made = {path.stem: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    monkeypatch.setenv("DSA_COMPILE_CACHE", str(tmp_path / "another"))
    alone = {
        cubin_name(k.source, arch="sm_90a", defines=k.defines): compiler.build(
            k.source, arch="sm_90a", defines=k.defines
        )
        for k in kernels
    }
    assert made == alone


def test_the_slowest_sources_come_first(monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(parallel_build, "processors", lambda: 1)
    monkeypatch.setattr(
        parallel_build, "_build_apart", lambda source, *_: begun.append(source) or b""
    )
    slow = parallel_build.SLOWEST[-1]
    list(build_each([("router.cu", {}), (slow, {}), ("norm_quantize.cu", {})], "sm_90a"))
    assert begun == [slow, "router.cu", "norm_quantize.cu"]
    assert all((compiler.SOURCES / source).is_file() for source in parallel_build.SLOWEST)


def test_a_source_that_does_not_compile_is_reported():
    source = (KERNEL.source, {**KERNEL.defines, "CHUNKS": "no_such_name"})
    with pytest.raises(KernelCompileError, match="no_such_name"):
        list(build_each([source], "sm_90a"))


def test_only_the_same_source_and_options_are_found(tmp_path, monkeypatch):
    done: list[tuple[int, int]] = []
    counted = write_kernels([KERNEL, KERNEL], "sm_90a", tmp_path, lambda *at: done.append(at))
    assert (counted, done) == (1, [(1, 1)])
    (file,) = tmp_path.iterdir()
    shipped = ShippedKernels({file.stem: file.read_bytes()})

    def find(arch: str = "sm_90a", **defines: int) -> bytes | None:
        return shipped.find(KERNEL.source, arch=arch, defines={**KERNEL.defines, **defines})

    assert find() == file.read_bytes()
    assert find("sm_100a") is None
    assert find(CHUNKS=8) is None

    # a header of ours that changed by a word
    sources = compiler._sources
    monkeypatch.setattr(
        compiler,
        "_sources",
        lambda name, found: {k: v + "//" for k, v in sources(name, found).items()},
    )
    assert find() is None
