"""The bf16 recipe: as close to exact arithmetic as the reference in bf16 is."""

import copy

import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.loading.load_runner import load_runner
from examples.small_models.models import save_hf, tiny_config, tiny_model

from .test_exact import one_request


def test_logits_are_no_further_from_fp32_than_those_of_the_reference(tmp_path):
    """Same bf16 weights; the yardstick is the reference computing with them in fp32."""
    model = tiny_model(tiny_config(4), dtype=torch.bfloat16)
    save_hf(model, tmp_path / "model")
    compile_model(tmp_path / "model", tmp_path / "artifact", block_size=16, recipe="bf16")
    exact = copy.deepcopy(model).float()
    runner = load_runner(tmp_path / "artifact", EngineOptions(num_gpu_blocks_override=40))
    ours, theirs = [], []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, 512, (80,), generator=generator).tolist()
        got = runner.execute(one_request(prompt, 0, len(prompt), runner.block_size))
        with torch.no_grad():
            want = exact(torch.tensor([prompt]), use_cache=False).logits[0]
            reference = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
        # up to index_topk keys nothing is selected, and rounding is all there is
        dense = slice(0, model.config.index_topk)
        ours.append((got[dense] - want[dense]).norm() / want[dense].norm())
        theirs.append((reference[dense] - want[dense]).norm() / want[dense].norm())
    assert torch.stack(ours).mean() <= 1.1 * torch.stack(theirs).mean()
