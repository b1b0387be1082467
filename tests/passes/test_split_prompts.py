from dsa_compile.config import CompileConfig
from dsa_compile.ir.passes import Numerics, PassRecord
from dsa_compile.passes.split_prompts import SplitPrompts
from dsa_compile.passes.split_short_long import SplitShortLong
from tests.passes.sketch import fragment
from tests.passes.test_split_short_long import BLOCK, embed, long


def test_layers_of_the_short_variant_are_copied() -> None:
    config = CompileConfig(block_size=BLOCK)
    program = fragment(embed, long, config=config)
    SplitShortLong()(program)
    record = SplitPrompts()(program)
    assert record.by_region == {"dense.short": 1}
    assert (record.rewrites, record.expected) == (2, 2)  # layers
    names = ["embed.long", "embed.short", "dense.long", "dense.short", "dense.prompt", "head"]
    assert list(program.regions) == names
    assert program.variants == ("long", "short", "prompt")
    assert str(program.regions["dense.prompt"].graph) == str(program.regions["dense.short"].graph)
    SplitPrompts().run(program, again := PassRecord("split_prompts", Numerics.BITWISE))
    assert again.by_region == {}


def test_what_is_not_a_layer_serves_the_prompt_variant_as_the_short_one() -> None:
    program = fragment(embed, long, config=CompileConfig(block_size=BLOCK))
    SplitShortLong()(program)
    SplitPrompts()(program)
    assert program.region("embed", "prompt") is program.regions["embed.short"]
    assert program.region("head", "prompt") is program.regions["head"]
    assert program.region("dense", "prompt") is program.regions["dense.prompt"]


def test_nothing_is_copied_where_nothing_is_split() -> None:
    program = fragment(embed, long, config=CompileConfig(block_size=BLOCK))
    assert SplitPrompts()(program).rewrites == 0
    assert program.variants == ()
