"""Drafting with CUDA graphs and overlapped steps on a Hopper GPU."""

import numpy as np
import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.sampling.sampler import SamplingState
from examples.small_models.models import save_hub, tiny_glm_config, tiny_model
from tests.trained import trained_model

from .test_padding import step

pytestmark = pytest.mark.gpu(capability=(9, 0))
BLOCKS, PAGES = 256, 32
LENGTHS = (5, 63, 130, 300)
WORDS = 8


def shared_selection(path):
    """A GLM whose deeper drafts attend to what the first one selected.

    Its eight words make drafts of random weights right by chance.
    """
    config = tiny_glm_config(
        3, indexer_types=["full", "full", "shared"], index_share_for_mtp_iteration=True,
        first_k_dense_replace=1, vocab_size=WORDS, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    save_hub(tiny_model(config), path, fp8=False)
    return path


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp32-shared"])
def artifact(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafting") / request.param
    recipe, _, shared = request.param.partition("-")
    model = shared_selection(tmp_path_factory.mktemp("glm")) if shared else trained_model()
    compile_model(model, path, target="sm_90a", recipe=recipe, draft="mtp", records=False)
    return path


def options(count, **others):
    limits = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 8, "max_model_len": 1024}
    return EngineOptions(num_speculative_tokens=count, **(limits | others))


def engine_of(artifact, count, **others):
    chosen = options(count, **others)
    return Engine(load_runner(artifact, chosen), chosen)


def words(artifact):
    """Tokens that prompts are drawn from: these and no higher ones."""
    return 3, WORDS if "shared" in str(artifact) else 1500


def requests_of(artifact):
    """Prompts below and beyond index_topk, greedy and sampled; the last two need the host.

    The others are five, for which graphs have six rows.
    """
    generator = np.random.default_rng(7)
    lengths = (4, 50, 61, 7, 200, 33, 20)
    prompts = [generator.integers(*words(artifact), length).tolist() for length in lengths]
    given = [
        {"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, *[{"temperature": 0.0}] * 2,
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.0, "repetition_penalty": 1.2}, {"temperature": 0.0, "logprobs": 2},
    ]  # fmt: skip
    return prompts, [SamplingParams(max_tokens=48, ignore_eos=True, **one) for one in given]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_deterministic_tokens_are_those_without_drafts(artifact, count):
    prompts, params = requests_of(artifact)
    found = []
    for drafts in (0, count):
        engine = engine_of(artifact, drafts, deterministic=True)
        # In two calls, for the captured steps not to be those of requests that need the host.
        parts = slice(0, 5), slice(5, 7)
        outputs = [o for part in parts for o in engine.generate(prompts[part], params[part])]
        found.append([output.token_ids for output in outputs])
        assert any(kind.graph != "eager" for kind in engine.stats().step_counts)
    assert found[0] == found[1]
    assert sum(engine.stats().accepted) > 0


def test_tokens_without_graphs_and_without_overlap_are_the_same(artifact):
    prompts, params = requests_of(artifact)
    found = []
    for others in ({}, {"enforce_eager": True}, {"async_scheduling": False}):
        outputs = engine_of(artifact, 3, **others).generate(prompts, params)
        found.append([output.token_ids for output in outputs])
    same = [a == b for other in found[1:] for a, b in zip(found[0], other, strict=True)]
    if "fp32" in str(artifact):
        assert all(same)
    assert sum(same) / len(same) > 0.5  # in bf16 a near-tie may fall otherwise


def test_forced_lengths_are_those_of_captured_steps(artifact):
    prompts, params = requests_of(artifact)
    for others in ({}, {"async_scheduling": False}):
        engine = engine_of(artifact, 3, force_accept=2.5, load_format="dummy", **others)
        engine.generate(prompts[:5], params[:5])
        assert any(kind.graph != "eager" for kind in engine.stats().step_counts)
        assert engine.stats().accepted_length == pytest.approx(2.5, abs=0.1)


def prefilled(artifact, **others):
    runner = load_runner(artifact, options(3, **others))
    generator = np.random.default_rng(0)
    for row, length in enumerate(LENGTHS):
        tokens = generator.integers(*words(artifact), length)
        batch = step(runner, [tokens], [row * PAGES], [0], [row])
        runner.launch(inputs_of(batch, [row], [1])).wait()
    return runner


def inputs_of(batch, rows, max_new):
    states = [SamplingState(SamplingParams(temperature=0.0), [1], (), 2048) for _ in rows]
    return StepInputs(
        batch, rows, states, [1] * len(rows), max_new, True, [-1] * batch.num_requests
    )


def decode(runner, lengths=LENGTHS, known=True):
    """Four rows of each request, as the first step behind its prompt or a later one."""
    rows = list(range(len(lengths)))
    tokens = [[5 if known else -1, -1, -1, -1] for _ in rows]
    batch = step(runner, tokens, [row * PAGES for row in rows], lengths, rows)
    return inputs_of(batch, rows, [4] * len(rows))


def test_a_graph_does_what_its_kernels_do(artifact):
    """Kernels launched one by one give the tokens, caches and drafts of a graph, bit for bit."""
    found = []
    for captured in (True, False):
        runner = prefilled(artifact)
        if not captured:
            runner._padded._captured.clear()
        first = runner.launch(decode(runner)).wait().results
        second = runner.launch(decode(runner, [n + 4 for n in LENGTHS], known=False)).wait().results
        caches = [cache for layer in runner.caches.values() for cache in layer.values()]
        state = runner._state
        rest = [state.last[:4], state.ends[:4], state.first[:4], *caches]
        rest += [states[:4] for states in runner._drafter.states.values()]
        found.append((first, second, [tensor.view(torch.uint8) for tensor in rest]))
        graphs = {kind.graph for kind in runner.step_counts}
        assert ("4" in graphs) == captured
    (first, second, tensors), others = found
    assert (first, second) == others[:2]
    for ours, theirs in zip(tensors, others[2], strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_waits_for_the_gpu(artifact):
    """Neither a captured step nor one with a chunk of a prompt, of tokens nobody knows."""
    runner = prefilled(artifact)
    ahead = decode(runner, [n + 4 for n in LENGTHS], known=False)
    mixed_batch = step(runner, [[-1, -1], [5, 6, 7]], [0, PAGES], [12, 80], [0, 1])
    mixed = inputs_of(mixed_batch, [0], [2])
    runner.launch(decode(runner)).wait()
    for inputs in (ahead, mixed):
        runner.launch(inputs).wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [runner.launch(inputs) for inputs in (ahead, mixed)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(tokens.wait().results) for tokens in launched] == [4, 1]
