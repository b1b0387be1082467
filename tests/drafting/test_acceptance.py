"""Drafts are as good as the plain measure of the MTP module says, step for step."""

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine
from tests.trained import trained_model

from .walks import DEPTH, prompts_of, record, walk_by_engine, walk_by_measure


def check(engine, loaded, text):
    """Compare every step of the answers to some prompts; drafts accepted a step, on average."""
    record(engine)
    accepted = []
    for prompt in prompts_of(text):
        found = walk_by_engine(engine, prompt)
        assert found.agrees(walk_by_measure(loaded, prompt, found.tokens))
        accepted += found.accepted
    return sum(accepted) / len(accepted)


def test_steps_accept_what_the_measure_predicts(make_engine, loaded, text):
    assert check(make_engine(DEPTH, "mtp"), loaded, text) > 1


def test_chunks_and_reused_prefixes_change_nothing(make_engine, loaded, text):
    """Rows of the draft layer are written across chunks as they are within one."""
    engine = make_engine(DEPTH, "mtp", max_num_batched_tokens=33)
    for _ in range(2):
        check(engine, loaded, text)
    assert engine.stats().prefix_hit_tokens > 0


def test_unfused_norms_draft_the_same(loaded, text, tmp_path):
    """Without the fusion, the norm of a draft's incoming state is a weight of its call."""
    path = tmp_path / "unfused"
    disable = ["fuse_add_norm_across_layers+"]
    compile_model(trained_model(), path, draft="mtp", block_size=16, disable=disable, records=False)
    engine = Engine.load(path, num_gpu_blocks_override=40, num_speculative_tokens=DEPTH)
    for prompt in prompts_of(text):
        found = walk_by_engine(engine, prompt)
        predicted = walk_by_measure(loaded, prompt, found.tokens)
        predicted.states = []  # those of an unfused engine are not normed yet
        assert found.agrees(predicted)
