import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.facts.block_quantization import BlockQuantization
from dsa_compile.measure.eval.layer_error import (
    ACCUMULATED,
    ISOLATED,
    compare_hidden,
    measure_layers,
    require_same_model,
)
from tests.measure.broken import with_spec, with_weight


def test_errors_by_hand():
    ours, theirs = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])], [
        torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0]]),
    ]  # fmt: skip
    error = compare_hidden(7, ISOLATED, ours, theirs)
    assert (error.layer, error.mode, error.tokens) == (7, ISOLATED, 2)
    assert error.cosine == pytest.approx(0.5)
    assert error.worst_cosine == pytest.approx(0.0)
    assert error.max_abs == 2.0
    assert error.relative == pytest.approx((8 / 29) ** 0.5)


def test_an_artifact_has_no_error_against_itself(loaded, ids):
    rows = measure_layers(loaded.runner(), loaded.runner(), [0, 1, 2], [ids, ids[:9]])
    assert [(r.mode, r.layer) for r in rows] == [
        (mode, layer) for mode in (ACCUMULATED, ISOLATED) for layer in (0, 1, 2)
    ]
    assert all(row.relative == row.max_abs == 0.0 and row.tokens == 109 for row in rows)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_permuted_weight_shows_in_its_layer(loaded, ids, layer):
    key = "self_attn.o_proj.weight"
    broken = with_weight(loaded, layer, key, lambda weight: weight.roll(1, 0))
    rows = measure_layers(broken.runner(), loaded.runner(), [0, 1, 2], [ids])
    alone = {row.layer: row.relative for row in rows if row.mode == ISOLATED}
    own = {row.layer: row.relative for row in rows if row.mode == ACCUMULATED}
    assert alone[layer] > 0.1
    assert all(alone[other] == 0.0 for other in alone if other != layer)
    assert all((own[other] > 0.05) == (other >= layer) for other in own)


def test_another_model_is_no_reference(loaded):
    with pytest.raises(UserError, match="compiled from different models"):
        require_same_model(loaded, with_spec(loaded, index_topk=8))


def test_a_quantised_copy_is_the_same_model(loaded):
    require_same_model(loaded, with_spec(loaded, quantization=BlockQuantization((128, 128))))
