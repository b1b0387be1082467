from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.passes import Numerics, PassRecord
from dsa_compile.passes.split_prompts import SplitPrompts
from dsa_compile.passes.split_short_long import SplitShortLong
from tests.passes.sketch import fragment
from tests.passes.test_split_short_long import BLOCK, embed, long


def test_layers_of_both_variants_are_copied() -> None:
    config = CompileConfig(block_size=BLOCK)
    program = fragment(embed, long, config=config)
    SplitShortLong()(program)
    record = SplitPrompts()(program)
    assert record.by_region == {"dense.long": 1, "dense.short": 1}
    assert (record.rewrites, record.expected) == (4, 4)  # layers
    layers = ["dense.long", "dense.long_prompt", "dense.short", "dense.prompt"]
    assert list(program.regions) == ["embed.long", "embed.short", *layers, "head"]
    assert program.variants == ("long", "short", "prompt", "long_prompt")
    for copied, copy in zip(layers[::2], layers[1::2], strict=True):
        assert str(program.regions[copy].graph) == str(program.regions[copied].graph)
    SplitPrompts().run(program, again := PassRecord("split_prompts", Numerics.BITWISE))
    assert again.by_region == {}


def test_what_is_not_a_layer_serves_prompts_as_it_serves_others() -> None:
    program = fragment(embed, long, config=CompileConfig(block_size=BLOCK))
    SplitShortLong()(program)
    SplitPrompts()(program)
    assert program.region("embed", "prompt") is program.regions["embed.short"]
    assert program.region("head", "prompt") is program.regions["head"]
    assert program.region("dense", "prompt") is program.regions["dense.prompt"]
    assert program.region("embed", "long_prompt") is program.regions["embed.long"]
    assert program.region("dense", "long_prompt") is program.regions["dense.long_prompt"]


def test_nothing_is_copied_where_nothing_is_split() -> None:
    program = fragment(embed, long, config=CompileConfig(block_size=BLOCK))
    assert SplitPrompts()(program).rewrites == 0
    assert program.variants == ()
