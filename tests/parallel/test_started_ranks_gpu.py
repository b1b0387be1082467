"""Two ranks on two GPUs that ``torchrun`` starts, and experts that they count."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from tests.trained import trained_model

from .conftest import LAYOUTS

pytestmark = pytest.mark.gpu(capability=(9, 0), count=2)
PROMPT = [5, 6, 7]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def artifact(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("started") / layout
            compile_model(
                trained_model(),
                made[layout],
                target="sm_90a",
                recipe="fp32",
                layout=LAYOUTS[layout],
            )
        return made[layout]

    return artifact


@pytest.mark.parametrize("layout", ["tp2", "dp2ep2"])
def test_torchrun_starts_a_rank_on_each_gpu(compiled, layout: str, tmp_path: Path) -> None:
    """With the tokens of ranks that the engine starts itself; all processes end with status 0."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "dsa_compile.cli.generate", str(compiled(layout)), "--prompt-ids", "5 6 7",
        "--max-tokens", "6", "--temperature", "0", "--ignore-eos",
        "--num-gpu-blocks-override", "64", "--json",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as output:  # not a pipe, which torch's compile workers would hold open
        status = subprocess.run(command, stdout=output, stderr=output, timeout=300).returncode
    said = log.read_text()
    assert status == 0, said
    with Engine.load(compiled(layout), num_gpu_blocks_override=64) as engine:
        (output,) = engine.generate([PROMPT], GREEDY)
    assert str(output.token_ids)[1:-1] in " ".join(said.split())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("layout", ["ep2", "dp2ep2"])
def test_experts_are_counted_on_all_ranks(compiled, layout: str, graphs: bool) -> None:
    options = {
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "enforce_eager": not graphs,
    }
    prompts = [list(range(3, 70)), PROMPT]
    counts = []
    for which in ("one", layout):
        with Engine.load(compiled(which), count_experts=True, **options) as engine:
            engine.generate(prompts, GREEDY)
            counts.append(dict(engine.stats().expert_tokens))
    wanted, found = counts
    assert wanted.keys() == found.keys()
    for layer, tokens in wanted.items():
        if layout == "ep2":
            assert found[layer] == tokens
        else:  # a lane's padding is counted with its tokens
            assert all(b >= a for a, b in zip(tokens, found[layer], strict=True))
