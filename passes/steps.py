"""Steps of the pipeline with what installed packages add, for those who only ask for facts."""

from importlib import metadata

from dsa_compile.facts.config import TARGETS, CompileConfig
from dsa_compile.passes.facts import GROUP, Step, built_in


def steps() -> tuple[Step, ...]:
    """Steps of the pipeline; torch is imported only where installed packages add some."""
    if not metadata.entry_points(group=GROUP):
        return built_in()
    from dsa_compile.passes.added import assemble
    from dsa_compile.passes.options import facts_of_pipeline

    config, pipeline = assemble(CompileConfig(target=TARGETS[0]), ())
    return facts_of_pipeline(pipeline, {added.name: added.package for added in config.added_passes})
