"""Faults as a real GPU has them: memory that runs out, kernels that are refused or go astray."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.kernels import registry
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams, StepError
from dsa_compile.runtime.execution import executor
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.loading import load_runner as loading
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.trained import trained_model

pytestmark = pytest.mark.gpu(capability=(9, 0))
ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def nothing(x, size: tl.constexpr):
    tl.store(x + tl.arange(0, size), 0.0)


@pytest.fixture(scope="module")
def artifact(trained):
    return trained("sm_90a", "fp32")


def prompts(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 1500, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def memory(extra):
    """No more device memory than is held now and so many bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_without_memory(artifact, overlap):
    """Smaller steps give the same tokens; who fails is told why; the engine goes on."""
    engine = Engine.load(
        artifact,
        num_gpu_blocks_override=512,
        max_num_seqs=8,
        enforce_eager=True,
        async_scheduling=overlap,
    )
    asked = prompts([1900, 5, 700, 64, 1200, 30, 1500])
    want = [output.token_ids for output in engine.generate(asked, PARAMS)]
    failures = set()
    for extra in (24 << 20, 4 << 20, 0):
        with memory(extra):
            outputs = engine.generate(asked, PARAMS)
        for output, tokens in zip(outputs, want, strict=True):
            if output.finish_reason == "error":
                assert "out of memory even when computed alone" in output.error
                assert " wanted " in output.error
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert output.token_ids == tokens
        failures.add(engine.stats().memory_failures)
        assert engine.stats().owned_blocks == 0
        engine.scheduler.check()
    assert max(failures) > 0, "no step failed: nothing was tested"
    assert [output.token_ids for output in engine.generate(asked, PARAMS)] == want


def test_no_memory_to_load(artifact):
    with memory(0), pytest.raises(UserError, match=r"GPU memory: the weights need \d"):
        load_runner(artifact)
    with memory(256 << 20), pytest.raises(UserError, match=r"_override=\d+: no memory for the ca"):
        load_runner(artifact, EngineOptions(num_gpu_blocks_override=200_000))


def test_no_memory_to_capture(artifact):
    runner = load_runner(
        artifact, EngineOptions(num_gpu_blocks_override=64, max_num_seqs=256, enforce_eager=True)
    )
    plan = GraphPlan.of(max_num_seqs=256, max_model_len=2048, block_size=runner.block_size, topk=64)
    with memory(0), pytest.raises(UserError, match=r"no room to capture .* lower max_num_seqs"):
        loading._capture(runner, plan, 256)
    runner.capture(plan)
    engine = Engine(runner)
    asked = prompts([5, 70, 200])
    want = Engine.load(artifact, num_gpu_blocks_override=64, max_num_seqs=8).generate(asked, PARAMS)
    found = engine.generate(asked, PARAMS)
    assert [output.token_ids for output in found] == [output.token_ids for output in want]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_refused_launch_names_its_op(artifact, monkeypatch, cuda_graphs):
    """More threads than a block can have. While it is captured, and in a step."""

    def refused(*args):
        nothing[(1,)](torch.empty(64, device="cuda"), 64, num_warps=64)

    def load(op, provider, target):
        return refused if op == "router" else registry.load(op, provider, target)

    monkeypatch.setattr(executor, "load", load)

    def serve():
        engine = Engine.load(
            artifact, num_gpu_blocks_override=64, max_num_seqs=8, enforce_eager=not cuda_graphs
        )
        return engine.generate(prompts([5]), PARAMS)

    if cuda_graphs:
        with pytest.raises(StepError) as raised:
            serve()
        message = str(raised.value)
    else:
        [output] = serve()
        assert output.finish_reason == "error"
        message = output.error
    assert ", region moe." in message
    assert ": dsa.router failed: " in message
    assert "made by pass merge_shared_expert" in message
    assert ("was captured" in message) is cuda_graphs
    # what failed left nothing behind on the device
    monkeypatch.undo()
    assert len(serve()[0].token_ids) == 12


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_its_op_refuses_fails_alone(artifact, monkeypatch, overlap):
    """One of 32: an op does not take a token of its prompt, which nobody else has."""
    options = {"num_gpu_blocks_override": 256, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    asked = prompts([5 + 9 * number for number in range(32)])
    want = Engine.load(artifact, **options, async_scheduling=overlap).generate(asked, PARAMS)
    seen = {token for output in want for token in output.prompt_token_ids + output.token_ids}
    refused = next(token for token in range(3, 1500) if token not in seen)
    asked[13][20] = refused

    def load(op, provider, target):
        found = registry.load(op, provider, target)

        def refusing(ids, *rest):
            # decode steps are captured, where nothing may wait for the GPU
            if not torch.cuda.is_current_stream_capturing() and bool((ids == refused).any()):
                nothing[(1,)](torch.empty(64, device="cuda"), 64, num_warps=64)
            return found(ids, *rest)

        return refusing if op == "embedding" else found

    monkeypatch.setattr(executor, "load", load)
    engine = Engine.load(artifact, **options, async_scheduling=overlap)
    outputs = engine.generate(asked, PARAMS)
    bad = outputs.pop(13)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "dsa.embedding failed: " in bad.error
    del want[13]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in want]
    assert engine.stats().op_failures > 1
    assert engine.stats().owned_blocks == 0


ASTRAY = """
import sys
import torch
from dsa_compile.kernels import registry
from dsa_compile.runtime import DeviceLost, Engine, SamplingParams
from dsa_compile.runtime.execution import executor

def astray(*args):
    torch.zeros(4, device="cuda")[torch.full((9,), 10**6, device="cuda")]  # asserts on the device
    return function(*args)

def load(op, provider, target):
    global function
    found = registry.load(op, provider, target)
    if op != "router":
        return found
    function = found
    return astray

executor.load = load
engine = Engine.load(
    sys.argv[1], num_gpu_blocks_override=64, enforce_eager=True,
    debug_launches=sys.argv[2] == "debug",
)
try:
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0))
except DeviceLost as error:
    print(error)
"""


@pytest.mark.parametrize("mode", ["ordinary", "debug"])
def test_a_kernel_that_goes_astray(artifact, mode):
    """In a process of its own, which cannot use the GPU afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", ASTRAY, str(artifact), mode],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    message = done.stdout
    assert "device-side assert triggered" in message, done.stderr[-2000:]
    assert "this process can use the GPU no more, start a new one" in message
    if mode == "debug":
        assert "layer 2, region moe.short: dsa.router failed on the GPU: " in message
        assert "made by pass " in message
    else:
        assert "debug_launches=True (dsa-generate --debug-launches)" in message


def test_debug_launches_give_the_same_tokens(artifact):
    asked = prompts([5, 70, 300])
    want, found = (
        [output.token_ids for output in engine.generate(asked, PARAMS)]
        for engine in (
            Engine.load(artifact, num_gpu_blocks_override=64, max_num_seqs=8, enforce_eager=True),
            Engine.load(artifact, num_gpu_blocks_override=64, max_num_seqs=8, debug_launches=True),
        )
    )
    assert found == want


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_nan_in_one_row_stays_there(artifact, cuda_graphs):
    """Request with NaN fails; others of its steps, and later owners of its blocks, lose nothing."""
    options = {"num_gpu_blocks_override": 40, "max_num_seqs": 8, "enforce_eager": not cuda_graphs}
    asked = [[3 if t == 999 else t for t in prompt] for prompt in prompts([5, 70, 200, 30])]
    want = Engine.load(artifact, **options).generate(asked, PARAMS)
    runner = load_runner(artifact, EngineOptions(**options))
    runner._weights["embed"]["embed_tokens.weight"][999] = torch.nan
    engine = Engine(runner, EngineOptions(max_num_seqs=8))
    spoiled = [prompt.copy() for prompt in asked]
    spoiled[1][20] = spoiled[2][150] = 999
    for _ in range(3):
        outputs = engine.generate(spoiled, PARAMS)
        assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length"]
        assert all("NaN" in outputs[row].error for row in (1, 2))
        assert [outputs[row].token_ids for row in (0, 3)] == [want[row].token_ids for row in (0, 3)]
    assert [o.token_ids for o in engine.generate(asked, PARAMS)] == [o.token_ids for o in want]


def test_an_abort_while_steps_are_in_flight(artifact):
    engine = Engine.load(artifact, num_gpu_blocks_override=128, max_num_seqs=8)
    asked = prompts([5, 70, 200, 30])
    want = [output.token_ids for output in engine.generate(asked, PARAMS)]
    for number, prompt in enumerate(asked):
        engine.add_request(f"r{number}", prompt, PARAMS)
    for _ in range(4):
        engine.step()
    assert engine._pipeline.busy
    aborted = engine.abort("r1")
    assert aborted.token_ids == want[1][: len(aborted.token_ids)]
    engine.add_request("r1", asked[1], PARAMS)
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.token_ids for output in engine.step() if output.finished}
    assert [done[f"r{number}"] for number in range(4)] == want
    assert engine.stats().owned_blocks == 0


def test_an_artifact_for_another_gpu(tmp_path):
    compile_model(trained_model(), tmp_path / "artifact", target="sm_100a", recipe="bf16")
    with pytest.raises(ArtifactError, match=r"compiled for sm_100a, this GPU .* is sm_90; recomp"):
        load_runner(tmp_path / "artifact")
