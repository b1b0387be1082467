import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.shard_head import ShardHead
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

dsa = torch.ops.dsa


def operands(vocabulary: int):
    return value("x", "T", 24), weight("lm_head.weight", vocabulary, 24)


def test_each_rank_has_a_part_of_the_vocabulary(check: PassCheck) -> None:
    @region("head", *operands(40))
    def before(x, table):
        return dsa.linear.default(x, table)

    @region("head", *operands(10))
    def after(x, table):
        return dsa.all_gather.default(dsa.linear.default(x, table), "tp", 4)

    check(ShardHead(), before, after, config=CompileConfig(layout=Layout(tp=4)))
