import torch

from dsa_compile.ops.selection import best_first


def test_nan_of_either_sign_comes_first_and_the_rest_keep_their_order():
    nan = torch.tensor([0x7FC00000, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    row = torch.tensor([1.0, 0.0, -0.0, float("inf"), 3.0, float("-inf"), 3.0])
    clean = best_first(row[None], 7)[0].tolist()
    assert clean == [3, 4, 6, 0, 1, 2, 5]
    for value in nan:
        scores = torch.cat((row, value[None]))[None]
        assert best_first(scores, 8)[0].tolist() == [7, *clean]
        both = torch.cat((scores, row.new_tensor([[0.0] * 8])[:, :8]))  # one row spoiled, one not
        assert best_first(both, 3).tolist() == [[7, 3, 4], [0, 1, 2]]


def test_nan_masked_by_minus_infinity_is_nothing():
    scores = torch.tensor([[float("nan"), 2.0, float("nan"), 1.0]])
    scores[:, [0, 2]] = float("-inf")
    assert best_first(scores, 2).tolist() == [[1, 3]]
