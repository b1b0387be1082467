"""The kernel that plans the work of experts with few rows, on the CPU, a thread for a thread."""

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import experts_fp8
from tests.kernels import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

EXPERTS, TOP_K, TOKENS, INNER = 40, 4, 16, 256


@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 50])
@pytest.mark.parametrize("choice", ["any", "skewed", "none"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_every_pair_has_a_row_of_its_expert(
    tokens: int, index: torch.dtype, choice: str, blocks: int
) -> None:
    """Up to 32 pairs one warp plans, beyond a whole block; with counters of what shares K."""
    torch.manual_seed(tokens)
    shape = experts_fp8.Shape(tokens=TOKENS, stages=2, blocks=blocks)
    counters = shape.counters(INNER, TOP_K)
    assert counters == {1: 1, 2: 3}[blocks]
    kernel = experts_fp8._kernels(EXPERTS, 256, INNER, TOP_K, index, shape).plan
    indices = torch.randint(-1, EXPERTS + 2, (tokens, TOP_K), dtype=index)
    if choice == "skewed":
        indices[:, 1:] = 7  # more rows than a group takes
    if choice == "none":
        indices.fill_(-1)
    pairs = indices.numel()
    most = min(pairs, EXPERTS) + pairs // TOKENS
    pair_of, row_of = (torch.full((pairs,), -9, dtype=torch.int32) for _ in range(2))
    groups = torch.full((most + 1, 4), -9, dtype=torch.int32)
    counts = torch.full((2,), -9, dtype=torch.int32)
    finished = torch.full((most + 1, counters), -9, dtype=torch.int32)
    emulator.launch(
        kernel, (1, 1, 1), 1024, indices, pairs, pair_of, row_of, groups, counts, finished
    )
    count, claimed = counts.tolist()
    assert claimed == 0
    flat = indices.flatten()
    present = (flat >= 0) & (flat < EXPERTS)
    rows = row_of[present]
    assert sorted(rows.tolist()) == list(range(int(present.sum())))
    assert (row_of[~present] == -1).all()
    assert torch.equal(pair_of[rows.long()], present.nonzero().flatten().int())
    expected = torch.bincount(flat[present].long(), minlength=EXPERTS)
    found, end = torch.zeros_like(expected), 0
    for expert, row, height, width in sorted(groups[:count].tolist(), key=lambda group: group[1]):
        assert row == end
        assert 0 < height <= width <= TOKENS
        assert (flat[pair_of[row : row + height].long()] == expert).all()
        found[expert] += height
        end += height
    assert torch.equal(found, expected)
    assert count <= most
    assert (finished[:count] == 0).all()
    assert (groups[count:] == -9).all()
    assert (finished[count:] == -9).all()
