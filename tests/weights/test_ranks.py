"""Shards of weights: every rank's window, of plain and of quantised expressions."""

import pytest
import torch

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.block_fp8 import scale_shape
from dsa_compile.weights.expr_json import expr_from_json, expr_to_json
from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.plan import (
    Concat,
    Load,
    Narrow,
    QuantizedScales,
    QuantizedValues,
    Shard,
    infer_shape,
)
from dsa_compile.weights.ranks import at_rank, every_rank, shards


class Parameter:
    """A reader of one parameter that counts what it was asked for."""

    def __init__(self, *shape: int) -> None:
        self.value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        self.read = 0

    def shape(self, name):
        return tuple(self.value.shape)

    def read_into(self, name, out, window=()):
        out.copy_(self.value[window])
        self.read += out.numel()


def part(expr, reader, rank: int) -> torch.Tensor:
    here = at_rank(expr, {"tp": rank})
    assert infer_shape(here, {}, reader.shape) == infer_shape(expr, {}, reader.shape)
    out = torch.empty(infer_shape(here, {}, reader.shape))
    write_expr(here, {}, reader, out)
    return out


@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_of_all_ranks_make_up_the_whole(dim: int) -> None:
    reader = Parameter(8, 12)
    expr = Shard("tp", 4, dim, reader.value.shape[dim] // 4, Load("w"))
    parts = [part(expr, reader, rank) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim), reader.value)
    assert reader.read == reader.value.numel()  # nothing twice


def test_of_stacked_pieces_a_rank_has_a_part_of_each() -> None:
    reader = Parameter(3, 8, 2)
    expr = Shard("tp", 2, 1, 2, Load("w"), stacked=2)
    gate, up = reader.value.chunk(2, 1)
    wanted = torch.cat([gate[:, 2:], up[:, 2:]], 1)
    assert torch.equal(part(expr, reader, 1), wanted)


def test_shards_below_other_expressions() -> None:
    expr = Concat(0, (Shard("tp", 2, 0, 4, Load("w")), Narrow(0, 0, 2, Load("w"))))
    assert [shard.axis for shard in shards(expr)] == ["tp"]
    assert every_rank(expr) == ({"tp": 0}, {"tp": 1})
    assert every_rank(Load("w")) == ({},)
    reader = Parameter(8, 3)
    assert torch.equal(part(expr, reader, 1), reader.value[[4, 5, 6, 7, 0, 1]])


def test_a_shard_keeps_the_blocks_of_the_whole() -> None:
    reader = Parameter(512, 256)
    values = Shard("tp", 2, 0, 256, QuantizedValues(Load("w")))
    scales = Shard("tp", 2, 0, 2, QuantizedScales(Load("w")))
    assert infer_shape(values, {}, reader.shape) == (256, 256)
    assert infer_shape(scales, {}, reader.shape) == scale_shape((256, 256), 1)


def test_parts_that_do_not_make_up_the_whole() -> None:
    with pytest.raises(ArtifactError, match="cannot cut"):
        infer_shape(Shard("tp", 4, 0, 3, Load("w")), {}, lambda name: (8, 2))


def test_a_plan_from_json() -> None:
    expr = Shard("tp", 4, 1, 3, Load("w"), stacked=2)
    assert expr_from_json(expr_to_json(expr)) == expr
    with pytest.raises(ArtifactError, match="lacks"):
        expr_from_json({k: v for k, v in expr_to_json(expr).items() if k != "stacked"})
