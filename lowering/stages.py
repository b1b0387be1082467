"""The stages of a compilation, from a checked request to the artifact in its place."""

from collections.abc import Sequence

from dsa_compile.artifact.writer import ArtifactWriter
from dsa_compile.frontend.build import build_program, load_spec, program_plans
from dsa_compile.frontend.config_notes import config_notes
from dsa_compile.frontend.reference import frontend_faults_named
from dsa_compile.ir.passes import Pass
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.compile_result import Clock, CompileResult
from dsa_compile.lowering.compiled_kernels import FOLDER, ship_kernels, ships_kernels
from dsa_compile.lowering.emit import emit
from dsa_compile.lowering.request import Request
from dsa_compile.passes.added import assemble
from dsa_compile.passes.facts import passes_of
from dsa_compile.passes.manager import check_selection, run_pipeline
from dsa_compile.passes.options import facts_of_pipeline
from dsa_compile.passes.selection import with_dependents
from dsa_compile.weights.checkpoint import Checkpoint


def run(
    request: Request, force: bool, clock: Clock, passes: Sequence[tuple[Pass, str]] = ()
) -> CompileResult:
    """Compile.

    Args:
        request: what to compile.
        force: replace an artifact that is there.
        clock: times the phases; the one that runs is ended first.
        passes: to add, each with the name of the pass that it runs after.

    Raises:
        UserError: see :func:`~dsa_compile.lowering.compile_model.compile_model`.
    """
    config, pipeline = assemble(request.options, passes)
    config = with_dependents(config, passes_of(facts_of_pipeline(pipeline)))
    check_selection(config, pipeline)
    model_dir, progress = request.model_dir, clock.progress
    with ArtifactWriter(request.out, force) as writer:
        clock.start("read")
        spec = load_spec(model_dir)
        notes = request.notes + config_notes(model_dir)
        checkpoint = None
        plans = program_plans(spec, config)
        if config.weights != "none":
            calls = (call for plan in plans.values() for call in plan.layers)
            layers = list(dict.fromkeys(call.index for call in calls))
            with frontend_faults_named(model_dir, spec, layers):
                checkpoint = Checkpoint.open(model_dir, spec, layers)
                notes += checkpoint.set_aside(spec, layers, config.ignore_tensors)
            notes += checkpoint.rounded_routers(config.dtype)
            checkpoint.require_equal_copies()
        clock.start("export")
        program = build_program(model_dir, config)
        clock.start("passes")
        run_pipeline(program, progress.passed, pipeline)
        bindings = bind_kernels(program)
        if ships_kernels(config):
            clock.start("kernels")
            notes += ship_kernels(program, bindings, writer.add_dir(FOLDER), progress.compiled)
        clock.start("emit")
        manifest = emit(program, writer, model_dir, checkpoint, bindings, progress.weights)
        clock.stop()
    return CompileResult(request.out, manifest, program, bindings, clock.seconds, notes)
