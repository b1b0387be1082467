import math

import pytest
import torch

from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.hf_agreement import (
    compare_generations,
    compare_logits,
    generate_greedily,
    measure_generations,
)


def test_logits_by_hand():
    reference = [torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.75, 0.25]]))]
    ours = [torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.25, 0.75]]))]
    found = compare_logits("it", ours, reference)
    assert (found.against, found.tokens) == ("it", 2)
    assert found.max_abs == pytest.approx(math.log(3))
    assert found.kl == pytest.approx((0.75 * math.log(3) - 0.25 * math.log(3)) / 2)
    assert found.same_top == 0.5


def test_a_shift_of_all_logits_diverges_by_nothing():
    logits = torch.randn(5, 7)
    found = compare_logits("it", [logits + 1], [logits])
    assert found.kl == pytest.approx(0.0, abs=1e-9)
    assert found.same_top == 1.0


def test_generations_match_up_to_the_first_difference():
    found = compare_generations("it", [[1, 2, 3], [1, 9, 3], [7]], [[1, 2, 3], [1, 2, 3], [7]])
    assert (found.prompts, found.identical, found.tokens, found.matching) == (3, 2, 7, 5)
    assert found.first_different == 1
    assert compare_generations("it", [[1]], [[1]]).first_different is None


def test_an_artifact_generates_what_transformers_does(loaded, ids):
    hf = HfModel(loaded.model_dir, loaded.spec)
    # below, across and above index_topk; two of one length share a batch there
    prompts = [ids[:3], ids[:12], ids[1:13], ids[:70]]
    found = measure_generations("hf", loaded.runner(), hf.generate, prompts, 8)
    assert (found.identical, found.matching) == (4, 32)
    sparse = generate_greedily(loaded.runner(), prompts, 8)
    dense = generate_greedily(loaded.runner("recent"), prompts, 8)
    assert compare_generations("recent", dense, sparse).identical < 4
