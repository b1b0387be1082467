"""Options that are wrong or do not go together."""

import pytest


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--recipe", "int3"], "unknown recipe 'int3'; choose one of fp32, bf16"),
        (["--target", "tpu"], "unknown target 'tpu'; choose one of auto"),
        (["--weights", "all"], "unknown weights 'all'; choose one of reference, pack, none"),
        (["--disable", "absorb_mlp"], "unknown pass 'absorb_mlp'; did you mean 'absorb_mla'?"),
        (["--stop-after", "nothing"], "unknown pass 'nothing'; dsa-compile --list-passes prints"),
        (
            ["--disable", "absorb_mla"],
            "cannot disable 'absorb_mla': flatten_tokens, fuse_rope_absorb need it, and the "
            "runtime needs insert_paged_caches",
        ),
        (["--layers", "0-9"], "--layers 0-9: the model has layers 0-1"),
        (["--layers", "1-0"], "--layers 1-0: the model has layers 0-1"),
        (["--layers", "two"], "argument --layers: 'two' is not a range such as 0-3"),
        (["--block-size", "48"], "unknown block size 48; choose one of 16, 32, 64"),
        (["--block-size", "9" * 30], "unknown block size 999"),
        (["--block-size", "x"], "argument --block-size: 'x' is not a number such as 4096"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate; see dsa-compile --help"),
    ],
)
def test_options(source, refusal, options, what):
    assert what in refusal.compiling(source, *options)
