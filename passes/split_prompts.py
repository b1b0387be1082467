"""Copy the layers of both variants for steps that are whole prompts.

Before::                        After::

    moe.long, moe.short             moe.long, moe.long_prompt, moe.short, moe.prompt

The copies are for steps in which the tokens of every request begin at position 0: the prompt
variant if no context exceeds ``index_topk``, else the long prompt variant. What they compute is the
same; ``expand_prompt_attention`` changes how. Prologue and head run as in the variants that were
copied.

Nothing is copied where the program is not split into long and short.
"""

from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.plan import PROMPTS, for_prompts
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region


class SplitPrompts(Pass):
    """Every layer's regions get copies under the names of the variants of prompts."""

    def expects(self, program: Program, region: Region) -> int | None:
        """Every region of a layer."""
        return int(_copy_of(program, region) is not None)

    def run(self, program: Program, record: PassRecord) -> None:
        """Add the copies, each behind the region that it is a copy of."""
        if any(variant in PROMPTS for variant in program.variants):
            return  # split already
        split: dict[str, Region] = {}
        for name, region in program.regions.items():
            split[name] = region
            if (variant := _copy_of(program, region)) is not None:
                copy = region.copy(f"{region.kind}.{variant}")
                split[copy.name] = copy
                record.by_region[name] = 1
        program.regions = split


def _copy_of(program: Program, region: Region) -> str | None:
    """Variant of prompts that is made from a region; None for what is no layer's."""
    return for_prompts(region.variant) if program.place(region) is Place.LAYER else None
