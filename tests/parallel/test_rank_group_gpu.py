"""Two ranks on two GPUs: the tokens of one, and an end where one dies or hangs."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dsa_compile.kernels.cuda.shared_buffer import SharedBuffer
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from tests.trained import trained_model

from .conftest import LAYOUTS

pytestmark = pytest.mark.gpu(capability=(9, 0), count=2)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
DRAWN = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
PROMPTS = [
    "import os",
    list(range(3, 150)),  # beyond index_topk, in chunks
    [*range(3, 150), 7, 8, 9],  # shares a prefix
    "def main():",
    *([number] * 14 for number in range(20, 26)),
]
OPTIONS = {
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 1024,
}
Compiled = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, fp8_model: Path) -> Compiled:
    made: dict[tuple[str, str], Path] = {}

    def artifact(layout: str, recipe: str) -> Path:
        """``"tp2-mtp"`` has plans that draft, too."""
        if (layout, recipe) not in made:
            path = made[layout, recipe] = tmp_path_factory.mktemp("gpus") / f"{layout}-{recipe}"
            model = fp8_model if recipe == "fp8" else trained_model()
            cut, _, draft = layout.partition("-")
            compile_model(
                model, path, target="sm_90a", recipe=recipe, layout=LAYOUTS[cut],
                draft=draft or None,
            )  # fmt: skip
        return made[layout, recipe]

    return artifact


def tokens(path: Path, *params: SamplingParams, prompts: Sequence = PROMPTS, **options) -> list:
    """Tokens of all prompts, twice with each of ``params``. One engine, as a group loads for long:
    the second time they find their prefixes."""
    with Engine.load(path, **{**OPTIONS, **options}) as engine:
        found = []
        for each in params * 2:
            found += [output.token_ids for output in engine.generate(prompts, each)]
        return found


@pytest.mark.parametrize("layout", ["tp2", "ep2", "dp2ep2"])
def test_two_gpus_give_the_tokens_of_one(compiled, layout: str) -> None:
    """In fp32, where another order of sums moves no argmax; with few blocks, so as to preempt."""
    wanted = tokens(compiled("one", "fp32"), GREEDY, deterministic=True)
    path = compiled(layout, "fp32")
    # lanes' steps are padded to one length, and take no such option
    options = {} if layout.startswith("dp") else {"deterministic": True}
    assert tokens(path, GREEDY, enforce_eager=True, **options) == wanted
    assert tokens(path, GREEDY, num_gpu_blocks_override=13) == wanted
    assert tokens(path, GREEDY, max_num_batched_tokens=1024) == wanted  # steps of whole prompts


@pytest.mark.parametrize("layout", ["tp2-mtp", "dp2ep2-mtp"])
def test_drafts_change_no_token_on_two_gpus(compiled, layout: str) -> None:
    """Each rank samples and counts accepted drafts for itself; lanes accept different numbers."""
    wanted = tokens(compiled("one", "fp32"), GREEDY, DRAWN, deterministic=True)
    path, fixed = compiled(layout, "fp32"), layout.startswith("tp")
    for options in (
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 3, "num_gpu_blocks_override": 24},
    ):
        assert tokens(path, GREEDY, DRAWN, deterministic=fixed, **options) == wanted


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_both_ways_to_sum_give_the_same_tokens(compiled, recipe: str) -> None:
    """Two summands have one sum, whoever adds them: to the last bit."""
    path, prompts = compiled("ep2", recipe), [[5, 6, 7], list(range(3, 150)), [8] * 14]
    nccl, ours = (
        tokens(path, GREEDY, DRAWN, prompts=prompts, deterministic=True, collectives=name)
        for name in ("nccl", "symmetric")
    )
    assert ours == nccl


@pytest.mark.parametrize(
    ("recipe", "graphs"), [("fp32", True), ("bf16", False), ("bf16", True), ("fp8", True)]
)
def test_lanes_exchange_tokens_either_way(compiled, recipe: str, graphs: bool) -> None:
    """Rows are gathered as they are, and two summands have one sum: to the last bit. Ranks sum fp32
    by NCCL both times."""
    # the FP8 checkpoint has no tokenizer
    prompts = [prompt for prompt in PROMPTS if recipe != "fp8" or not isinstance(prompt, str)]
    path, options = compiled("dp2ep2", recipe), {"enforce_eager": not graphs, "prompts": prompts}
    nccl = tokens(path, GREEDY, **options)
    assert tokens(path, GREEDY, collectives="symmetric", **options) == nccl


@pytest.mark.parametrize("layout", ["tp2", "dp2ep2"])
def test_an_engine_loads_again_with_new_ranks(
    compiled, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """This process shares memory with others than before; what it shared at first is freed."""
    path, options = compiled(layout, "bf16"), {"enforce_eager": True, "collectives": "symmetric"}
    buffers: list[SharedBuffer] = []
    made = SharedBuffer.__init__
    monkeypatch.setattr(
        SharedBuffer, "__init__", lambda self, nbytes: (buffers.append(self), made(self, nbytes))[1]
    )
    first, again = (tokens(path, GREEDY, **options) for _ in range(2))
    assert again == first
    assert [len(buffer._mapped) for buffer in buffers] == [0, 0]


LOSING = """
import os, signal, sys
from dsa_compile.runtime import DeviceLost, Engine, SamplingParams

path, collectives, sent = sys.argv[1:]
options = dict(num_gpu_blocks_override=64, max_num_seqs=8, max_model_len=1024, rank_timeout=20)
engine = Engine.load(path, collectives=collectives, **options)
(pid,) = engine._runner.pids
engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
for _ in range(3):
    engine.step()
os.kill(pid, getattr(signal, sent))
try:
    for _ in range(100):
        engine.step()
except DeviceLost as error:
    print("LOST", str(error).replace(str(pid), "PID"), flush=True)
os._exit(0)
"""


def test_fp8_ranks_know_the_prompt_as_one_does(compiled) -> None:
    """The checkpoint's blocks are sliced by rank, and sums are rounded otherwise: a little."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for layout in ("one", "tp2", "ep2"):
        with Engine.load(compiled(layout, "fp8"), **OPTIONS) as engine:
            (output,) = engine.generate([list(range(3, 150))], params)
            found.append(torch.tensor([entry.logprob for entry in output.prompt_logprobs]))
    for other in found[1:]:
        assert (other - found[0]).abs().median() < 0.25


@pytest.mark.parametrize("collectives", ["nccl", "symmetric"])
@pytest.mark.parametrize(
    ("sent", "words"), [("SIGKILL", "was killed by SIGKILL"), ("SIGSTOP", "did not answer")]
)
def test_a_lost_rank_ends_the_group_by_name(
    compiled, tmp_path: Path, collectives: str, sent, words: str
) -> None:
    """In a process of its own: a kernel that gave up leaves the GPU unusable for it."""
    path = compiled("ep2", "bf16")
    command = [sys.executable, "-c", LOSING, str(path), collectives, sent]
    log = tmp_path / "log"
    with log.open("w") as output:  # not a pipe, which torch's compile workers would hold open
        subprocess.run(command, stdout=output, stderr=output, timeout=300)
    assert f"LOST rank 1 (process PID) {words}" in log.read_text()
