"""An op that fails is named: where it is, what made it, whether it may not be the one to blame."""

import re
import weakref
from dataclasses import replace

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import UserError
from dsa_compile.kernels import registry
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.sequences import whole_batch
from dsa_compile.ops import STREAM_OPS
from dsa_compile.runtime import DeviceLost, Engine, OutOfMemory, SamplingParams, StepError
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution import executor as executor_module
from dsa_compile.runtime.failures.step_errors import as_step_error, is_device_lost, is_out_of_memory
from dsa_compile.runtime.loading import load_parts
from dsa_compile.runtime.loading.load_runner import load_runner
from examples.small_models.models import save_hf, tiny_config, tiny_model

from .async_runner import NO_MEMORY

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9] * 12]
ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call\n"
)
REFUSED = UserError("experts takes contiguous tensors, not strides (1, 7)")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Layer 0 is dense, layers 1 and 2 are not."""
    root = tmp_path_factory.mktemp("faults")
    config = tiny_config(3, first_k_dense_replace=1, n_routed_experts=8)
    save_hf(tiny_model(config), root / "model")
    compile_model(root / "model", root / "artifact", block_size=16)
    return root / "artifact"


class Fault:
    """Raises ``error`` in one call of an op; -1 for none."""

    def __init__(self, function):
        self.function, self.error, self.call = function, None, -1

    def __call__(self, *args):
        if self.error is not None:
            if self.call == 0:
                raise self.error
            self.call -= 1
        return self.function(*args)


@pytest.fixture
def planted(monkeypatch):
    """``planted(op)``: a :class:`Fault` in place of the op's kernel, for what is loaded next."""

    def plant(op):
        faults = []

        def load(name, provider, target):
            function = registry.load(name, provider, target)
            if name != op:
                return function
            fault = Fault(function)
            faults.append(fault)
            return lambda *args: fault(*args)

        monkeypatch.setattr(executor_module, "load", load)
        return faults

    return plant


def failing(artifact, faults, op, error, call=0):
    """Error of a step when an op raises, and the engine over the same runner."""
    engine = Engine.load(artifact, num_gpu_blocks_override=32)
    assert faults, f"no region calls {op}"
    for fault in faults:
        fault.error, fault.call = error, call
    runner = engine._runner
    with pytest.raises(StepError) as raised:
        runner.execute(whole_batch(PROMPTS, [1, 1], runner.block_size))
    for fault in faults:
        fault.error = None
    return engine, raised.value


def regions_of(artifact):
    opened = Artifact.open(artifact)
    return {record.name: opened.region(record.name) for record in opened.manifest.regions}


def test_a_kernels_refusal_names_op_layer_region_and_pass(artifact, planted):
    """The second layer of its kind: one function serves both, the call says which."""
    faults = planted("experts")
    engine, error = failing(artifact, faults, "experts", REFUSED, call=1)
    nodes = regions_of(artifact)["moe.short"].graph.nodes
    [node] = [node for node in nodes if str(node.target) == "dsa.experts.default"]
    assert type(error) is StepError
    message = str(error)
    assert message.startswith(
        "layer 2, region moe.short: dsa.experts failed: experts takes contiguous tensors, not "
        f"strides (1, 7) (node {node.name}, module {node.meta['path']}, "
        f"made by pass {node.meta['origin']}, operands float32[16, 128], "
    ), message
    assert "\n" not in message
    assert error.__cause__ is REFUSED
    assert [o.finish_reason for o in engine.generate(PROMPTS, GREEDY)] == ["length"] * 2


def test_other_errors_say_what_they_are(artifact, planted):
    _, error = failing(artifact, planted("experts"), "experts", KeyError("tile"))
    assert "layer 1, region moe.short: dsa.experts failed: KeyError: 'tile' (node " in str(error)


def test_ops_of_torch_are_named_too(artifact, monkeypatch):
    def refuse(*args):
        raise RuntimeError("sizes do not match")

    monkeypatch.setitem(executor_module._DIRECT, torch.ops.aten.view.default, refuse)
    engine = Engine.load(artifact, num_gpu_blocks_override=32)
    for output in engine.generate(PROMPTS, GREEDY):
        assert output.finish_reason == "error"
        assert ": layer 0, region dense.short: aten.view failed: RuntimeError" in output.error
    assert engine.stats().owned_blocks == 0


def test_the_prologue_and_the_head_have_no_layer(artifact, planted):
    _, error = failing(artifact, planted("embedding"), "embedding", REFUSED)
    assert str(error).startswith("region embed.short: dsa.embedding failed: ")


def test_an_error_reported_late_blames_nobody_and_says_how_to_find_out(artifact, planted):
    _, error = failing(artifact, planted("experts"), "experts", torch.AcceleratorError(ILLEGAL))
    assert type(error) is DeviceLost
    assert re.fullmatch(
        r"the GPU failed: CUDA error: an illegal memory access was encountered\. It was noticed at "
        r"or after what is to blame, for kernels run while the host goes on: layer 1, region "
        r"moe\.short: dsa\.experts \(node .*\)\. To find it, load with debug_launches=True "
        r"\(dsa-generate --debug-launches\) to have the op named; this process can use the GPU no "
        r"more, start a new one",
        str(error),
    )


def test_waiting_for_every_op_names_the_one_to_blame(artifact):
    """The error appears when the op is waited for, as a GPU reports it."""
    runner = load_runner(artifact, EngineOptions(num_gpu_blocks_override=32))
    waits = []

    def wait():
        waits.append(1)
        if len(waits) == 20:
            raise torch.AcceleratorError(ILLEGAL)

    regions = regions_of(artifact)
    runner._wait = wait
    with pytest.raises(DeviceLost) as raised:
        Engine(runner.variation(regions=regions)).generate(PROMPTS[:1], GREEDY)
    places = (
        ("region embed.short", "embed.short"),
        ("layer 0, region dense.short", "dense.short"),
    )
    calls = [
        (place, node)
        for place, name in places
        for node in regions[name].graph.nodes
        if node.op == "call_function"
    ]
    place, node = calls[20 - 2]  # the first wait is for the step's inputs
    op = str(node.target).removesuffix(".default")
    message = str(raised.value)
    assert message.startswith(f"{place}: {op} failed on the GPU: CUDA error: an illegal memory ")
    assert f"(node {node.name}, " in message
    assert message.endswith("; this process can use the GPU no more, start a new one")


def test_options_of_loading_reach_the_loader(artifact, monkeypatch):
    """Every option, but for the digest: that of the artifact whose tokenizer was loaded."""
    given = []

    def spy(path, options):
        given.append(options)
        raise UserError("seen enough")

    monkeypatch.setattr(load_parts, "load_runner", spy)
    with pytest.raises(UserError, match="seen enough"):
        Engine.load(artifact, debug_launches=True, enforce_eager=True, verify="header")
    (options,) = given
    wanted = EngineOptions(debug_launches=True, enforce_eager=True, verify="header")
    digest = Artifact.open(artifact).manifest.digest
    assert options == replace(wanted, digest=digest, shipped_kernels=False)


def test_debug_launches_load_and_generate_the_same_tokens(artifact):
    plain = Engine.load(artifact, num_gpu_blocks_override=32).generate(PROMPTS, GREEDY)
    debugged = Engine.load(artifact, num_gpu_blocks_override=32, debug_launches=True).generate(
        PROMPTS, GREEDY
    )
    assert [o.token_ids for o in debugged] == [o.token_ids for o in plain]
    with pytest.raises(UserError, match="leave out async_scheduling"):
        Engine.load(artifact, debug_launches=True, async_scheduling=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_its_op_refuses_fails_alone(artifact, planted, overlap):
    """One of 32: an op does not take its second token, which nobody else has."""
    faults = planted("embedding")
    engine = Engine.load(
        artifact, num_gpu_blocks_override=128, async_scheduling=overlap, max_num_batched_tokens=64
    )
    prompts = [[number + 3, 4, 5] for number in range(32)]
    want = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    seen = {token for tokens in prompts + want for token in tokens}
    refused = next(token for token in range(100, engine._runner.vocab_size) if token not in seen)
    prompts[13] = [5, refused, 6]

    def refusing(function):
        def call(ids, *rest):
            if (ids == refused).any():
                raise UserError("a refused token")
            return function(ids, *rest)

        return call

    for fault in faults:
        fault.function = refusing(fault.function)
    outputs = engine.generate(prompts, GREEDY)
    bad = outputs[13]
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "embedding failed: a refused token (node " in bad.error
    good = [output.token_ids for output in outputs]
    assert good[:13] + good[14:] == want[:13] + want[14:]
    assert engine.stats().op_failures > 1
    assert engine.stats().owned_blocks == 0


def hungry(engine, faults, context):
    """Let the planted op find no memory in steps with a context of so many tokens or more."""
    forward, longest = engine._runner.forward, [0]
    left = []

    def watched(batch):
        longest[0] = int(batch.context_lens.max())
        return forward(batch)

    def starved(function):
        def call(hidden, *rest):
            if longest[0] < context:
                return function(hidden, *rest)
            left.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError(NO_MEMORY)

        return call

    engine._runner.forward = watched
    for fault in faults:
        fault.function = starved(fault.function)
    return left


def test_an_op_without_memory_fails_its_request_with_the_op_named(artifact, planted):
    faults = planted("experts")
    engine = Engine.load(artifact, num_gpu_blocks_override=32)
    want = [o.token_ids for o in engine.generate(PROMPTS, GREEDY)]
    hungry(engine, faults, context=12)
    good, bad = engine.generate(PROMPTS, GREEDY)
    assert good.token_ids == want[0]
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert re.match(
        r"request 'generate-2-1': out of memory even when computed alone, 1 token at position 11: "
        r"layer 1, region moe\.short: dsa\.experts wanted 2\.00 GiB with 412\.00 MiB free \(node ",
        bad.error,
    )


def test_nothing_of_a_step_without_memory_is_held_when_it_is_tried_again(artifact, planted):
    faults = planted("experts")
    engine = Engine.load(artifact, num_gpu_blocks_override=32)
    left = hungry(engine, faults, context=6)
    held = []
    forward = engine._runner.forward

    def tried(batch):
        held.append(sum(tensor() is not None for tensor in left))
        return forward(batch)

    engine._runner.forward = tried
    assert engine.generate([PROMPTS[1]], GREEDY)[0].finish_reason == "error"
    assert len(left) >= 4
    assert set(held) == {0}


def test_out_of_memory_is_told_apart():
    for error in (
        torch.OutOfMemoryError(NO_MEMORY),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        UserError("topk.cu: topk grid (1, 1, 1) block 64: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:123] . DefaultCPUAllocator: can't allocate "
                     "memory: you tried to allocate 99 bytes. Error code 12"),
    ):  # fmt: skip
        assert is_out_of_memory(error), error
        assert not is_device_lost(error), error
        assert type(as_step_error(error, "a step was launched")) is OutOfMemory
    assert str(as_step_error(torch.OutOfMemoryError(NO_MEMORY), "a step was launched")) == (
        "wanted 2.00 GiB with 412.00 MiB free while a step was launched"
    )


def test_a_lost_device_is_told_apart():
    for error in (
        torch.AcceleratorError(ILLEGAL),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: device-side assert triggered"),
        UserError("topk.cu: topk grid (1, 1, 1) block 64: CUDA_ERROR_ILLEGAL_ADDRESS"),
    ):
        assert is_device_lost(error), error
        assert not is_out_of_memory(error), error
        assert type(as_step_error(error, "tokens were waited for")) is DeviceLost
    for error in (
        RuntimeError("CUDA error: invalid argument"),
        RuntimeError("CUDA error: too many resources requested for launch"),
        UserError("topk.cu: topk grid (1, 1, 1) block 64: CUDA_ERROR_INVALID_VALUE"),
        KeyError("an illegal memory access"),
    ):
        assert not is_device_lost(error), error
        assert as_step_error(error, "a step was launched") is None


def test_every_call_of_a_graph_has_a_line_of_its_own(artifact):
    """Line of a call is how the node of a traceback is found."""
    kernels = Artifact.open(artifact).manifest.kernels
    for region in regions_of(artifact).values():
        module = executor_module.bind(region, kernels, "cpu").__self__
        lines = [line.partition(" = ")[0].strip() for line in module.code.splitlines()]
        for node in region.graph.nodes:
            if node.op == "call_function" and node.target not in STREAM_OPS:
                assert lines.count(node.name) == 1, (region.name, node.name)
