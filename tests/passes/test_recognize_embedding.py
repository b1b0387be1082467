import torch

from dsa_compile.passes.recognize_embedding import RecognizeEmbedding
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (batch("input_ids", "B", "S"), weight("embed_tokens.weight", 32, 8))
IDS = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(0))


def test_becomes_one_op_and_forgets_the_padding_index(check: PassCheck) -> None:
    @region("embed", *INPUTS, outputs=("hidden",))
    def before(ids, table):
        return aten.embedding.default(table, ids, 3)

    @region("embed", *INPUTS, outputs=("hidden",))
    def expected(ids, table):
        return dsa.embedding.default(ids, table)

    check(RecognizeEmbedding(), before, expected, inputs={"input_ids": IDS})


def test_declines_an_embedding_scaled_by_frequency(check: PassCheck) -> None:
    @region("embed", *INPUTS, outputs=("hidden",), path="embed_tokens")
    def before(ids, table):
        return aten.embedding.default(table, ids, -1, True)

    message = check.declines(RecognizeEmbedding(), before)
    assert "argument scale_grad_by_freq=True is not the default" in message


def test_a_prologue_without_embedding_is_an_error(check: PassCheck) -> None:
    @region("embed", value("x", "B", "S", 8), outputs=("hidden",))
    def before(x):
        return aten.neg.default(x)

    assert check.declines(RecognizeEmbedding(), before).endswith("nothing came near")
