import pytest
import torch

from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.indexer_overlap import (
    compare_rows,
    lengths_around,
    measure_overlap,
    references,
)
from tests.measure.broken import with_weight

INF = float("inf")


@pytest.fixture(scope="module")
def indexers(loaded):
    return references(loaded)


def test_rows_are_compared_with_the_best_keys():
    scores = torch.tensor([[4.0, 2.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.double)
    # a wrong second key; the right ones, since of equal scores the lower positions win
    found = compare_rows(scores, torch.tensor([[0, 3], [1, 0]]), topk=2)
    assert found.share.tolist() == [0.5, 1.0]
    unit = 1.25**0.5  # standard deviation of 1, 2, 3, 4
    assert found.margin.tolist() == [pytest.approx(1 / unit), 0.0]
    assert found.deficit.tolist() == [pytest.approx(2 / unit), 0.0]


def test_rows_that_see_fewer_keys_than_they_may_choose_must_take_all():
    scores = torch.tensor([[5.0, -INF, -INF], [1.0, 3.0, -INF]], dtype=torch.double)
    found = compare_rows(scores, torch.tensor([[0, -1], [1, -1]]), topk=2)
    assert found.share.tolist() == [1.0, 0.5]
    assert found.margin.isnan().all()
    # beyond that, nothing of what was chosen lies below the cut
    assert found.deficit.tolist() == [0.0, 0.0]


def test_lengths_lie_on_both_sides_of_topk():
    assert lengths_around(64, 1536) == [32, 64, 96, 256, 1024]
    assert lengths_around(2048, 4096) == [1024, 2048, 3072]


def test_the_reference_chooses_as_transformers_does(loaded, indexers, ids):
    hf = HfModel(loaded.model_dir, loaded.spec)
    inputs, chosen = [], []
    for layer in hf._model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
        layer.self_attn.indexer.register_forward_hook(
            lambda module, args, out: chosen.append(out[0])
        )
    list(hf.logits([ids]))
    topk = loaded.spec.index_topk
    for indexer, hidden, keys in zip(indexers.values(), inputs, chosen, strict=True):
        found = compare_rows(indexer.scores(hidden)[topk:], keys[topk:], topk)
        assert found.share.mean() > 0.999


@pytest.mark.parametrize("length", [8, 16, 24, 100])
def test_a_right_indexer_overlaps_wholly(loaded, indexers, ids, length):
    rows = measure_overlap(loaded.runner(), indexers, {length: [ids[:length]]}, 16, "sparse")
    assert [row.layer for row in rows] == [0, 1, 2]
    assert all(row.mean > 0.999 and row.deficit < 1e-4 for row in rows)
    assert all((row.margin is None) == (length <= 16) for row in rows)
    assert rows[0].rows == (length - 16 if length > 16 else length)


@pytest.mark.parametrize("control", ["random", "recent", "interleaved"])
def test_wrong_choices_are_seen_above_topk_alone(loaded, indexers, ids, control):
    sequences = {16: [ids[:16]], 100: [ids]}
    rows = measure_overlap(loaded.runner(control), indexers, sequences, 16, control)
    assert all(row.mean == 1.0 for row in rows[:3])
    assert all(row.mean < 0.8 and row.deficit > 0.5 for row in rows[3:])


def test_a_broken_indexer_is_seen_in_its_layer_alone(loaded, indexers, ids):
    key = "self_attn.indexer.wq_b.weight"
    broken = with_weight(loaded, 1, key, lambda weight: weight.roll(5, 0))
    rows = measure_overlap(broken.runner(), indexers, {100: [ids]}, 16, "sparse")
    assert [row.mean > 0.999 for row in rows] == [True, False, True]
    assert rows[1].mean < 0.8
