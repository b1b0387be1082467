from rich.console import Console

from dsa_compile.measure.eval.hf_agreement import GreedyAgreement, LogitAgreement
from dsa_compile.measure.eval.indexer_overlap import Overlap
from dsa_compile.measure.eval.layer_error import ACCUMULATED, ISOLATED, LayerError
from dsa_compile.measure.eval.mtp_acceptance import GENERATED, TEXT, Acceptance
from dsa_compile.measure.eval.perplexity import Perplexity
from dsa_compile.measure.eval.recall_accuracy import Recall
from dsa_compile.measure.eval.results import ArtifactResults, row_json
from dsa_compile.measure.eval.tables import tables


def cells(*rows, disabled=()):
    """The lines of the tables, cells split at two spaces or more, without headings."""
    artifact = ArtifactResults("it", "path/it", "0123456789abcdef", "bf16", disabled)
    artifact.rows += rows
    console = Console(width=200)
    with console.capture() as capture:
        for table in tables([artifact]):
            console.print(table)
    lines = capture.get().splitlines()
    return [line.split() for line in lines if line.strip().startswith("it ")]


def test_artifacts_are_told_apart_by_their_passes():
    assert cells(disabled=("fuse_add_norm", "pack_swiglu")) == [
        ["it", "bf16", "fuse_add_norm,", "pack_swiglu", "0123456789ab", "0.0"]
    ]


def test_perplexity_is_related_to_that_of_the_models_own_keys():
    _, sparse, dense = cells(
        Perplexity("sparse", 10, 20, 0.0),
        Perplexity("dense", 10, 20, 10 * 0.0953102),
        Recall("sparse", 64, 8, 6),
        Recall("dense", 128, 8, 8),
    )
    assert sparse == ["it", "sparse", "1.0000", "1.0000", "75.0", "%"]
    assert dense == ["it", "dense", "1.1000", "1.0488", "+10.00", "%", "100.0", "%"]


def test_layers_are_summarised_by_the_mean_and_the_worst():
    _, row = cells(
        Overlap("sparse", 0, 64, 5, 1.0, 1.0, 0.25, 0.0),
        Overlap("sparse", 1, 64, 5, 0.9, 0.5, 0.5, 0.125),
    )
    # overlap, worst layer, worst row, margin, deficit
    assert row == "it sparse 64 95.00 % 90.00 % 50.0 % 0.25 0.12".split()  # noqa: SIM905


def test_accepted_drafts_add_to_the_models_own_token():
    _, text, generated = cells(
        Acceptance(TEXT, 1, 100, 60),
        Acceptance(GENERATED, 1, 200, 150),
        Acceptance(GENERATED, 2, 200, 50),
    )
    assert text == "it text 60.0 % 100 1.60".split()  # noqa: SIM905
    assert generated == "it generated 75.0 % 25.0 % 200 2.00".split()  # noqa: SIM905


def test_errors_and_agreement():
    _, layer, agreement = cells(
        LayerError(3, ACCUMULATED, 9, 1.0, 0.5, 1.0, 0.125),
        LayerError(3, ISOLATED, 9, 1.0, 0.75, 2.0, 0.0625),
        LogitAgreement("hf", 10, 0.5, 0.001, 0.9),
        GreedyAgreement("hf", 4, 3, 40, 35, 2),
    )
    assert layer == "it 3 1.25e-01 0.500000 6.25e-02 0.750000 2.00e+00".split()  # noqa: SIM905
    assert agreement == "it hf 5.00e-01 1.00e-03 90.00 % 3/4 35/40".split()  # noqa: SIM905


def test_json_has_what_is_derived_and_null_for_what_is_not_finite():
    assert row_json(Recall("sparse", 64, 8, 6))["accuracy"] == 0.75
    assert row_json(Perplexity("sparse", 1, 1, 1e6))["per_token"] is None
