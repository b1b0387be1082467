"""Errors of loading when something is missing: memory, a GPU, a package."""

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.records import KernelRecord
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.kernels import registry
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import OutOfMemory, StepError
from dsa_compile.runtime.execution import executor
from dsa_compile.runtime.execution.captured_steps import CapturedSteps, StepParts
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.execution.executor import implementation
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.execution.plain_inputs import PlainInputs
from dsa_compile.runtime.loading import load_runner as loading
from dsa_compile.runtime.loading import memory_plan, weight_loading
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.loading.memory_plan import StepSizes, measure_memory
from dsa_compile.runtime.pages.kinds import GIB, make_caches, page_bytes
from examples.small_models.models import save_hf, tiny_config, tiny_model

from .async_runner import NO_MEMORY

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), root / "model")
    compile_model(root / "model", root / "artifact", block_size=16)
    return root / "artifact"


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError(NO_MEMORY)


@pytest.fixture
def gpu(monkeypatch):
    """140 GiB, of which 3 are free and 30 ours."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 30 * GIB)


def untouched(*args, **kwargs):
    raise AssertionError("weights were read before it was known that nothing can run")


def test_weights_say_what_they_need_and_what_there_is(artifact, gpu, monkeypatch):
    needed = sum(
        tensor.nbytes
        for call in weight_loading.load_weights(Artifact.open(artifact), None).values()
        for tensor in call.values()
    )
    monkeypatch.setattr(weight_loading, "_weights", no_memory)
    with pytest.raises(UserError) as raised:
        load_runner(artifact)
    assert f"the weights need {needed / GIB:.1f} GiB and this machine has less" in str(raised.value)
    # so that the sizes of a tiny model show
    monkeypatch.setattr(loading, "GIB", needed / 64)
    message = loading._no_memory_for_weights(Artifact.open(artifact), CUDA)
    share = 64 * GIB / needed
    assert message == (
        f"GPU memory: the weights need 64.0 GiB; the GPU has {140 * share:.1f}, of which "
        f"{107 * share:.1f} are taken by CUDA and by other processes; compile fewer --layers or a "
        "recipe with smaller weights, or free what else runs on it"
    )


def test_caches_say_what_they_need_and_how_many_blocks_fit(artifact, gpu, monkeypatch):
    manifest = Artifact.open(artifact).manifest
    made = []

    def zeros(shape, dtype, device):
        assert device == CUDA
        made.append(shape)
        if len(made) == 3:
            no_memory()
        return torch.empty(0)

    monkeypatch.setattr(torch, "zeros", zeros)
    page = page_bytes(manifest)
    blocks = 6 * GIB // page
    with pytest.raises(UserError) as raised:
        make_caches(manifest, blocks, CUDA)
    assert str(raised.value).startswith(f"num_gpu_blocks_override={blocks}: no memory for the cach")
    assert "which need 6.0 GiB in 2 layers and the GPU had 3.0 free (for " in str(raised.value)
    most = int(str(raised.value).partition("(for ")[2].split()[0])
    assert most * page <= 3 * GIB < (most + 2) * page
    assert "give a smaller number, or none and a lower gpu_memory_util" in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(NO_MEMORY),
        OutOfMemory("layer 1, region moe.long: dsa.experts wanted 2.00 GiB with 412.00 MiB free"),
    ],
)
def test_the_plan_says_which_step_was_too_large(artifact, gpu, monkeypatch, error):
    def steps(*args):
        raise error

    manifest = Artifact.open(artifact).manifest
    monkeypatch.setattr(memory_plan, "_measure_steps", steps)
    with pytest.raises(UserError) as raised:
        measure_memory(manifest, {}, [], StepSizes(2048, 64, 32_768), None, 0.9)
    message = str(raised.value)
    assert "a prefill of 2,048 tokens and a decode step of 64 requests, each at a con" in message
    assert "of 32,768, do not fit beside the weights (137.0 of 140.0 GiB): " in message
    assert "wanted 2.00 GiB with 412.00 MiB free; lower max_num_batched_tokens, ma" in message


def test_other_errors_of_the_first_steps_pass_as_they_are(artifact, gpu, monkeypatch):
    def refused(*args):
        raise StepError("layer 1: refused")

    monkeypatch.setattr(memory_plan, "_measure_steps", refused)
    manifest = Artifact.open(artifact).manifest
    with pytest.raises(StepError, match="layer 1: refused"):
        measure_memory(manifest, {}, [], StepSizes(2048, 64, 32_768), None, 0.9)


PLAN = GraphPlan((1, 2, 4), {"long": (8,)})


class Capture:
    """CUDA's graphs, and a step whose ``failing``-th run raises."""

    def __init__(self, monkeypatch, failing, error):
        self.log, self.failing, self.error, self.runs = [], failing, error, 0
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
        capture = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                capture.log.append("begin")

            def capture_end(self):
                capture.log.append("end")
                if capture.runs == failing:
                    raise RuntimeError("CUDA error: capturing stream has unjoined work")

        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)

    def take_views(self, layout):
        return layout.in_numpy(np.zeros(layout.nbytes, np.uint8))

    def send(self, buffer):
        buffer.zero_()

    def step(self, tensors, variant):
        self.runs += 1
        if self.runs == self.failing:
            raise self.error
        return torch.zeros(len(tensors["input_ids"]), 7)

    def all(self, plan=PLAN):
        cpu = torch.device("cpu")
        parts = StepParts(PlainInputs, self.step, lambda key: 7, torch.float32, cpu, self)
        CapturedSteps(parts).capture(plan)


def test_graphs_are_captured_and_all_are_ended(monkeypatch):
    capture = Capture(monkeypatch, failing=0, error=None)
    capture.all()
    assert (capture.runs, capture.log) == (6, ["begin", "end"] * 3)


@pytest.mark.parametrize("failing", [3, 4])
def test_the_error_of_a_step_is_told_not_that_of_its_capture(monkeypatch, failing):
    """Before it is captured, and while it is: between two streams a capture cannot even end."""
    error = StepError("layer 1, region moe.long: dsa.experts failed: no such tile")
    capture = Capture(monkeypatch, failing, error)
    with pytest.raises(StepError) as raised:
        capture.all()
    assert str(raised.value) == f"{error}, while a decode step of 2 rows was captured"
    assert capture.log.count("begin") == capture.log.count("end"), "a capture goes on for ever"


def test_no_memory_to_capture_says_what_and_which_options(monkeypatch):
    capture = Capture(monkeypatch, 4, torch.OutOfMemoryError(NO_MEMORY))
    runner = SimpleNamespace(capture=capture.all, num_blocks=99)
    with pytest.raises(UserError) as raised:
        loading._capture(runner, PLAN, 64)
    assert str(raised.value) == (
        "GPU memory: no room to capture decode steps of up to 64 requests beside 99 blocks: "
        "wanted 2.00 GiB with 412.00 MiB free while a decode step of 2 rows was captured; lower "
        "max_num_seqs, num_gpu_blocks_override or gpu_memory_utilization, or load without CUDA "
        "graphs, enforce_eager"
    )


def test_an_artifact_for_another_gpu_is_refused_before_its_weights(artifact, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of("sm_90a") == torch.device("cuda", 3)
    monkeypatch.setattr(loading, "WeightLoad", untouched)
    monkeypatch.setattr(loading, "device_of", lambda target: device_of("sm_100a"))
    with pytest.raises(ArtifactError) as raised:
        load_runner(artifact)
    assert str(raised.value) == (
        "the artifact is compiled for sm_100a, this GPU (NVIDIA H200) is sm_90; recompile with "
        "--target sm_90a"
    )


def test_an_artifact_for_a_gpu_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArtifactError, match="compiled for sm_90a, and torch sees no CUDA GPU here"):
        device_of("sm_90a")


@pytest.mark.parametrize(
    ("package", "op"), [("deep_gemm", "linear_fp8"), ("flash_mla", "paged_latent_attention")]
)
def test_a_missing_package_is_named(package, op):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ArtifactError) as raised:
        implementation(
            f"dsa.{op}.default", {f"dsa.{op}.default": (KernelRecord(package),)}, "sm_90a"
        )
    assert str(raised.value) == (
        f"dsa::{op}: {package} is not installed (build it from its repository); install it, or "
        "recompile without it"
    )


def test_a_missing_package_is_told_before_the_weights_are_read(artifact, monkeypatch):
    def missing(op, provider, target):
        if op == "experts":
            raise UserError(f"dsa::{op}: deep_gemm is not installed (build it)")
        return registry.load(op, provider, target)

    monkeypatch.setattr(executor, "load", missing)
    monkeypatch.setattr(loading, "WeightLoad", untouched)
    with pytest.raises(ArtifactError, match=r"dsa::experts: deep_gemm is not .*; install it, or"):
        load_runner(artifact)
