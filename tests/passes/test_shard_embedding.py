import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.shard_embedding import ShardEmbedding
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, region, weight

dsa = torch.ops.dsa


def operands(width: int):
    return batch("input_ids", "T"), weight("embed_tokens.weight", 40, width)


def test_each_rank_has_some_columns(check: PassCheck) -> None:
    @region("embed", *operands(24), outputs=("hidden",))
    def before(ids, table):
        return dsa.embedding.default(ids, table)

    @region("embed", *operands(12), outputs=("hidden",))
    def after(ids, table):
        return dsa.all_gather.default(dsa.embedding.default(ids, table), "tp", 2)

    layout = Layout(tp=2, shard_embedding=True)
    given = {"input_ids": torch.arange(12) * 3}
    check(ShardEmbedding(), before, after, inputs=given, config=CompileConfig(layout=layout))


def test_it_runs_only_if_the_layout_says_so() -> None:
    assert not ShardEmbedding().runs(CompileConfig(layout=Layout(tp=2)))
