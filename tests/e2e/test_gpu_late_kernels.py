"""After loading no step waits for a kernel, whatever its size and its requests' options."""

import itertools
import json
import random

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.step.released import CONFIG
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.scheduling.stats import EAGER

pytestmark = pytest.mark.gpu(capability=(9, 0), alone=True)
LONGEST = 12_000
OPTIONS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.2},
)


def requests(vocab: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 200 lengths, as many short as long ones, with all options in turn."""
    draw = random.Random(0)
    lengths: set[int] = {1, 2, 3}
    while len(lengths) < 200:
        lengths.add(int(longest ** draw.random()) if draw.random() < 0.5 else
                    draw.randint(1, longest))  # fmt: skip
    prompts = [[draw.randrange(3, vocab) for _ in range(length)] for length in lengths]
    draw.shuffle(prompts)
    options = itertools.cycle(OPTIONS)
    params = [
        SamplingParams(max_tokens=draw.randint(1, 12), ignore_eos=True, **next(options))
        for _ in prompts
    ]
    return prompts, params


def check(engine: Engine, vocab: int, longest: int, graphed: bool = True) -> None:
    """Alone, then in each other's company; ``graphed``: some steps replay CUDA graphs."""
    prompts, params = requests(vocab, longest)
    for prompt, chosen in zip(prompts[:40], params[:40], strict=True):
        engine.generate([prompt], chosen)
    assert engine.stats().late_kernels == 0, "alone"
    engine.generate(prompts, params)
    stats = engine.stats()
    assert stats.late_kernels == 0, "together"
    graphs = {kind.graph for kind in stats.step_counts}
    assert EAGER in graphs
    assert any(graph.isdigit() for graph in graphs) == graphed
    assert stats.wait_seconds > 0


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A dense and an MoE layer of the released geometry; it brings graphs and kernels alone."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    options = {"recipe": "fp8", "target": "sm_90a", "layers": (2, 3), "weights": "none"}
    compile_model(folder / "model", folder / "artifact", **options)
    return folder / "artifact"


@pytest.mark.parametrize(
    "options",
    [{"shipped_kernels": True}, {"shipped_kernels": False}, {"enforce_eager": True}],
)
def test_prompts_of_200_lengths(released, options):
    engine = Engine.load(
        released,
        load_format="dummy",
        max_model_len=16_000,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
        **options,
    )
    check(engine, CONFIG["vocab_size"], LONGEST, graphed=options.get("cuda_graphs", True))


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_of_200_lengths_of_a_trained_model(trained, recipe, deterministic):
    path = trained("sm_90a", recipe)
    engine = Engine.load(
        path, num_gpu_blocks_override=400, max_num_seqs=16, deterministic=deterministic
    )
    check(engine, 1500, 1000)
