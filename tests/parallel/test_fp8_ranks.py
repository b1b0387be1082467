"""Two ranks of a checkpoint in FP8 blocks: its blocks are kept, and so is what the model knows."""

from pathlib import Path

import pytest
import torch

from dsa_compile.facts.layout import Layout
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams

from .conftest import LAYOUTS

PROMPT = list(range(3, 120))


def prompt_logprobs(artifact: Path) -> torch.Tensor:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with Engine.load(artifact, num_gpu_blocks_override=16) as engine:
        (output,) = engine.generate([PROMPT], params)
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs])


@pytest.mark.slow
def test_two_ranks_know_the_prompt_as_one_does(fp8_model: Path, tmp_path: Path) -> None:
    found = {}
    for name in ("one", "tp2", "ep2"):
        layout: Layout = LAYOUTS[name]
        path = tmp_path / name
        compile_model(fp8_model, path, target="cpu", recipe="fp8", layout=layout, records=False)
        graphs = "".join(file.read_text() for file in (path / "graphs").glob("*.py"))
        assert ("all_reduce_add_rms_norm_quantize" in graphs) == (name != "one")
        assert "= ops.dsa.all_reduce(" not in graphs  # all of them have a norm behind them
        found[name] = prompt_logprobs(path)
    spread = (found["one"] - found["one"].mean()).abs().median()
    for name in ("tp2", "ep2"):
        # 0.11 of it, as choices of keys and experts tip over; of another model it would be 1.4
        assert (found[name] - found["one"]).abs().median() < 0.4 * spread
