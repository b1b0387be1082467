"""Copy the layers of the short variant for steps that are whole prompts.

Before::                        After::

    dense.long, dense.short         dense.long, dense.short, dense.prompt
    moe.long, moe.short             moe.long, moe.short, moe.prompt

The prompt variant is for short steps in which the tokens of every request begin at position 0. What
it computes is the same; ``expand_prompt_attention`` changes how. Prologue and head run as in the
short variant.

Nothing is copied where the program is not split into long and short.
"""

from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.plan import PROMPT, SHORT
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region


class SplitPrompts(Pass):
    """Every layer's short region gets a copy under the name of the prompt variant."""

    def expects(self, program: Program, region: Region) -> int | None:
        """The short region of every layer."""
        return int(_copied(program, region))

    def run(self, program: Program, record: PassRecord) -> None:
        """Add the copies, each behind the region that it is a copy of."""
        if PROMPT in program.variants:
            return  # split already
        split: dict[str, Region] = {}
        for name, region in program.regions.items():
            split[name] = region
            if _copied(program, region):
                copy = region.copy(f"{region.kind}.{PROMPT}")
                split[copy.name] = copy
                record.by_region[name] = 1
        program.regions = split


def _copied(program: Program, region: Region) -> bool:
    return region.variant == SHORT and program.place(region) is Place.LAYER
