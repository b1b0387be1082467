"""Which region runs a step of a variant."""

from dsa_compile.ir.plan import LONG, PROMPT, SHORT, region_name, variants_taking


def test_the_variant_made_for_a_step_is_the_first_of_those_that_take_it():
    assert variants_taking(LONG) == (LONG,)
    assert variants_taking(SHORT) == (SHORT, LONG)
    assert variants_taking(PROMPT) == (PROMPT, SHORT, LONG)


def test_a_kind_without_a_prompt_region_runs_its_short_one():
    regions = {"embed.long", "embed.short", "moe.long", "moe.short", "moe.prompt", "head"}
    assert region_name(regions, "moe", PROMPT) == "moe.prompt"
    assert region_name(regions, "embed", PROMPT) == "embed.short"
    assert region_name(regions, "embed", LONG) == "embed.long"
    assert region_name(regions, "head", PROMPT) == "head"
    assert region_name({"moe", "head"}, "moe", PROMPT) == "moe"
    assert region_name({"moe"}, "moe", None) == "moe"
