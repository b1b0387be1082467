import torch

from dsa_compile.ir.dims import shape_names
from dsa_compile.passes.select_logit_rows import SelectLogitRows
from tests.passes.conftest import PassCheck
from tests.passes.sketch import (
    SIZES,
    RandomParameters,
    batch,
    execute,
    fragment,
    random_inputs,
    region,
    value,
    weight,
)

aten, dsa = torch.ops.aten, torch.ops.dsa

HIDDEN, W = value("normed", "T", 32), weight("lm_head.weight", 16, 32)


@region("head", HIDDEN, W)
def before(hidden, w):
    return dsa.linear.default(hidden, w)


@region("head", HIDDEN, batch("logit_rows", "N"), W)
def expected(hidden, rows, w):
    return dsa.linear.default(aten.index_select.default(hidden, 0, rows), w)


def test_all_rows_give_what_no_selection_gave(check: PassCheck) -> None:
    every = torch.arange(SIZES["T"])
    check(SelectLogitRows(), before, expected, after_inputs={"logit_rows": every})


def test_some_rows_or_none() -> None:
    program = fragment(before)
    parameters, inputs = RandomParameters(program), random_inputs(program)
    whole = execute(program, None, parameters, inputs)["logits"]
    SelectLogitRows()(program)
    for rows in ([7, 0], []):
        chosen = {**inputs, "logit_rows": torch.tensor(rows, dtype=torch.int64)}
        logits = execute(program, None, parameters, chosen)["logits"]
        torch.testing.assert_close(logits, whole[rows], rtol=1e-6, atol=1e-6)
        assert logits.shape == (len(rows), 16)


def test_everything_behind_the_selection_is_typed_again() -> None:
    program = fragment(before)
    SelectLogitRows()(program)
    (logits,) = program.regions["head"].graph.output_node().args[0]
    assert shape_names(logits.meta["val"]) == ("N", "16")
