"""Run the pipeline: check what the user switched off, run, and verify each level."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dsa_compile.errors import CompileError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.placement_check import placement_problems
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.refusal import way_into
from dsa_compile.ir.spec import verify
from dsa_compile.passes.added import pipeline_of
from dsa_compile.passes.facts import passes_of
from dsa_compile.passes.options import facts_of_pipeline
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.passes.selection import check_passes


def pass_names(
    pipeline: Sequence[Pass | Level] = PIPELINE, config: CompileConfig | None = None
) -> tuple[str, ...]:
    """Names of the passes, in order; of those that a configuration runs, if one is given."""
    passes = [step for step in pipeline if isinstance(step, Pass)]
    return tuple(step.name for step in passes if config is None or step.runs(config))


def check_selection(config: CompileConfig, pipeline: Sequence[Pass | Level] = PIPELINE) -> None:
    """Refuse a selection of passes that cannot work; see
    :func:`~dsa_compile.passes.selection.check_passes`."""
    check_passes(config, passes_of(facts_of_pipeline(pipeline)))


def run_pipeline(
    program: Program,
    progress: Callable[[PassRecord], None] = lambda record: None,
    pipeline: Sequence[Pass | Level] | None = None,
) -> None:
    """Run every pass that the program's configuration leaves on.

    Args:
        program: at the EXPORTED level; rewritten in place, records appended.
        progress: called after each pass.
        pipeline: the passes, and the levels between them; those of the configuration if None.

    Raises:
        UserError: see :func:`check_selection`.
        CompileError: a pass broke its promise or left values that ranks cannot share, or a level's
            form is not met; says how to look into the program before it.
    """
    if pipeline is None:
        pipeline = pipeline_of(program.config)
    check_selection(program.config, pipeline)
    if program.config.records:
        program.exported = {name: region_to_json(r) for name, r in program.regions.items()}
    for step in pipeline:
        if isinstance(step, Level):
            with _telling_the_way_in(program):
                verify(program, step)
            program.level = step
        elif step.runs(program.config):
            with _telling_the_way_in(program):
                record = step(program)
            progress(record)
            if problem := rank_refusal(program):
                way = way_into(program.records[:-1])
                raise CompileError(f"pass {step.name}{problem}{way}")
            if step.name == program.config.stop_after:
                return


@contextmanager
def _telling_the_way_in(program: Program) -> Iterator[None]:
    """Add to an error how to look into the program before it: a rewrite in it may be the wrong one.

    An error that no user causes keeps its type and has it as a note.
    """
    try:
        yield
    except CompileError as error:
        raise CompileError(f"{error}{way_into(program.records)}") from error
    except Exception as error:
        if program.records:
            error.add_note(way_into(program.records).removeprefix("; "))
        raise


def rank_refusal(program: Program) -> str:
    """What the last pass left where ranks take a value for what it is not, or the empty text.

    Asked behind each pass, so that the one to blame is named and not the one behind which a level
    is.
    """
    if program.config.layout.world == 1:
        return ""
    for problem in placement_problems(program):
        region = problem.partition(":")[0]
        sites = [site for site in program.records[-1].journal.sites if site.region in (region, "")]
        where = f" site {sites[0].number}" if len(sites) == 1 else ""
        return f"{where}: ranks cannot run what it leaves: {problem}"
    return ""
