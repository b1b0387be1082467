"""``dsa-eval`` measures what an engine accepts, and reports drafting that is wrong."""

import pytest

from dsa_compile.errors import UserError
from dsa_compile.measure.eval import suite
from dsa_compile.measure.eval.draft_chains import chains_of
from dsa_compile.measure.eval.engine_acceptance import (
    drafting_engine,
    engine_acceptance,
)
from dsa_compile.measure.eval.mtp_acceptance import (
    ENGINE,
    PREDICTED,
    Acceptance,
)
from dsa_compile.measure.eval.options import Options

from .test_faults import FAULTS
from .walks import DEPTH, GENERATED, prompts_of


@pytest.fixture(scope="module")
def measure(loaded, text):
    """Rows of an engine that some function changed."""
    drafts = chains_of(loaded, 256)

    def rows_of(change):
        engine = drafting_engine(loaded, DEPTH, 256)
        change(engine._runner)
        return engine_acceptance(engine, drafts, prompts_of(text), GENERATED, DEPTH, exact=True)

    return rows_of


@pytest.mark.slow
def test_planted_faults_are_reported(measure, monkeypatch):
    assert len(FAULTS) >= 10
    measure(lambda runner: None).require_agreement()
    for name in sorted(FAULTS):
        with monkeypatch.context() as patch:
            found = measure(lambda runner, name=name, patch=patch: FAULTS[name](patch, runner))
            with pytest.raises(UserError, match="see wrong states"):
                found.require_agreement()


def test_an_evaluation_compares_an_engine_with_the_measure(artifact):
    options = Options(
        measures=("mtp",), context=64, sequences=1, draft_prompts=2, generate=24, depth=3, tokens=64
    )
    (results,) = suite.evaluate([artifact], options)
    rows = results.of_type(Acceptance)
    found, wanted = ([r.accepted for r in rows if r.source == s] for s in (ENGINE, PREDICTED))
    assert found == wanted
    assert found[0] > 0
    assert not results.notes
