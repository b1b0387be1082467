"""Compiling again gives the same bytes, whatever Python's hashes and addresses are."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.artifact.records import TIMINGS
from dsa_compile.measure.step.released import write_released
from tests.lowering.reproduce import CASES, compile_case

ROOT = Path(__file__).parent.parent.parent
SEEDS = ("0", "1", "42", "4711", "4294967295")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that GPU kernels take."""
    return write_released(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiled(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder for each seed of hashes, with an artifact for each target and recipe."""

    def run(seed: str) -> Path:
        out = tmp_path_factory.mktemp("out")
        command = [sys.executable, "-m", "tests.lowering.reproduce", str(model_dir), str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
        return out

    with ThreadPoolExecutor(min(len(SEEDS), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(run, SEEDS))


def content(artifact: Path) -> dict[str, bytes]:
    """Every file by name but the one that says how long passes took."""
    files = {
        path.relative_to(artifact).as_posix(): path.read_bytes()
        for path in sorted(artifact.rglob("*"))
        if path.is_file()
    }
    del files[TIMINGS]
    return files


def require_equal(artifacts: list[Path]) -> None:
    first = content(artifacts[0])
    for other in map(content, artifacts[1:]):
        assert first.keys() == other.keys()
        assert [name for name in first if first[name] != other[name]] == []
    assert len({open_manifest(artifact).digest for artifact in artifacts}) == 1


@pytest.mark.slow
def test_an_artifact_has_the_same_bytes_again_in_one_process(
    model_dir: Path, tmp_path: Path
) -> None:
    """Objects have other addresses, by which sets of them are ordered."""
    folders = [tmp_path / str(number) for number in range(3)]
    artifacts = []
    for folder in folders:
        folder.mkdir()
        artifacts.append(compile_case(model_dir, folder, "sm_90a", "fp8", records=False))
    require_equal(artifacts)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "recipe"), CASES)
def test_an_artifact_has_the_same_bytes_in_every_process(
    compiled: list[Path], target: str, recipe: str
) -> None:
    require_equal([folder / f"{target}-{recipe}" for folder in compiled])


@pytest.mark.slow
def test_a_region_has_streams(compiled: list[Path]) -> None:
    """Else the tests above would not see the order of what they hold."""
    graphs = (compiled[0] / "sm_90a-fp8" / "graphs").glob("*.py")
    assert any("on_stream" in graph.read_text() for graph in graphs)
