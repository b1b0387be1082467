"""Machine code in an artifact: run by the engine that was allowed to, and by no other."""

import hashlib
import json
import shutil

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError
from dsa_compile.kernels import registry
from dsa_compile.kernels.cuda.shipped import NO_KERNELS, ShippedKernels, kernels_in_use
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.execution import executor
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.loading import load_runner as loading
from dsa_compile.runtime.sampling import device_sampler
from dsa_compile.runtime.sampling.sampler import SamplingState
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.artifact.building import edit_manifest

CODE = b"\x7fELF, if this were a GPU"
NAME = "kernels/some-kernel.cubin"
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    root = tmp_path_factory.mktemp("shipped")
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1, n_routed_experts=8)), root / "model")
    compile_model(root / "model", root / "artifact", block_size=16, weights="pack")
    return root / "artifact"


@pytest.fixture
def artifact(compiled, tmp_path):
    """For the CPU, with machine code that nothing there would launch."""
    path = shutil.copytree(compiled, tmp_path / "artifact")
    (path / "kernels").mkdir()
    (path / NAME).write_bytes(CODE)
    record = {"path": NAME, "size": len(CODE), "sha256": hashlib.sha256(CODE).hexdigest()}
    edit_manifest(path, lambda data: data["files"].append(record))
    return path


def load(artifact, **options):
    return Engine.load(artifact, num_gpu_blocks_override=16, **options)


def held(engine):
    return engine._runner.shipped_kernels


def test_machine_code_is_run_only_if_allowed_or_pinned(artifact, caplog):
    caplog.set_level("INFO", "dsa_compile.runtime")
    digest = json.loads((artifact / "manifest.json").read_text())["digest"]
    mine = ShippedKernels({"some-kernel": CODE}).digest
    for options, wanted, logged in (
        ({}, NO_KERNELS.digest, "does not run the 1 compiled kernels in it: if you trust"),
        ({"shipped_kernels": False, "digest": digest}, NO_KERNELS.digest, "does not run the 1"),
        ({"shipped_kernels": True}, mine, "runs the 1 compiled kernels in it"),
        ({"digest": digest}, mine, "runs the 1 compiled kernels in it"),
    ):
        caplog.clear()
        assert held(load(artifact, **options)).digest == wanted
        line = caplog.messages[0]
        assert logged in line
        assert ("shipped_kernels=True (--shipped-kernels)" in line) == ("not run" in line)


def test_engines_of_one_process_do_not_share_the_choice(artifact, monkeypatch):
    in_use = []

    def noting(name, provider, target):
        function = registry.load(name, provider, target)

        def call(*args):
            in_use.append(kernels_in_use())
            return function(*args)

        return call

    monkeypatch.setattr(executor, "load", noting)
    trusting = load(artifact, shipped_kernels=True)
    wary = load(artifact, shipped_kernels=False)
    shutil.rmtree(artifact)  # what was checked is held
    for engine in (trusting, wary, trusting):
        in_use.clear()
        engine.generate([[5, 6, 7]], PARAMS)
        assert in_use
        assert set(in_use) == {held(engine)}
    assert kernels_in_use() is NO_KERNELS


def test_tokens_are_chosen_with_the_runners_machine_code(monkeypatch, artifact):
    runner = load(artifact, shipped_kernels=True)._runner
    sampler = runner._sampler
    in_use = []
    monkeypatch.setattr(device_sampler, "sample_tokens", lambda *_: in_use.append(kernels_in_use()))
    sampler._last_tokens = sampler._last_tokens.to("meta")
    states = [SamplingState(PARAMS, [1], (), 32)]
    inputs = StepInputs(None, [0], states, [0], [1], ahead=True)
    sampler.launch(torch.zeros(1, 32, device="meta"), inputs)
    assert in_use == [runner.shipped_kernels]


def test_machine_code_is_checked_again_when_it_is_read(artifact):
    with_kernels = Artifact.open(artifact)
    (artifact / NAME).write_bytes(CODE[::-1])
    with pytest.raises(ArtifactError, match=rf"{NAME}: not the content that was compiled"):
        loading._shipped_kernels(with_kernels)


def test_a_refused_artifact_leaves_nothing_in_use(artifact, monkeypatch):
    read = []
    monkeypatch.setattr(
        loading, "ShippedKernels", lambda cubins: read.append(1) or ShippedKernels(cubins)
    )
    weights = artifact / "weights" / "head.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"head\.safetensors: not the content"):
        load(artifact, shipped_kernels=True)
    assert read
    assert kernels_in_use() is NO_KERNELS
