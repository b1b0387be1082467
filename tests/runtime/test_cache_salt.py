"""Prefixes are shared among requests of one salt: no other finds what they have computed."""

import numpy as np
import pytest

from dsa_compile.errors import RequestError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.pages.prefixes import PrefixIndex
from tests.runtime.hash_runner import HashRunner, reference_tokens

SIZE, VOCAB = 4, 64
SALTS = (None, "", "a", "b", "ab", "salt:a")
PROMPT = list(range(1, 14))


def make_engine(**config) -> Engine:
    return Engine(HashRunner(64, SIZE, VOCAB, 2000, ()), EngineOptions(**config))


def cached(engine: Engine, name: str, salt: str | None, prompt: list[int] = PROMPT) -> int:
    """Prompt tokens that a request finds in the cache."""
    engine.add_request(name, prompt, SamplingParams(max_tokens=3, temperature=0.0), cache_salt=salt)
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                assert output.token_ids == reference_tokens(prompt, 3, VOCAB)
                found = output.cached_tokens
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prefix_is_found_under_its_own_salt_alone(deterministic):
    engine = make_engine(deterministic=deterministic, max_num_batched_tokens=SIZE)
    for salt in SALTS:
        assert cached(engine, f"first {salt}", salt) == 0
    for salt in SALTS:
        assert cached(engine, f"second {salt}", salt) == 12


def test_requests_of_two_salts_at_once_share_no_block():
    engine = make_engine()
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for salt in SALTS:
        for number in (1, 2):
            engine.add_request(f"{salt} {number}", PROMPT, params, cache_salt=salt)
    held: dict[int, set[bytes | None]] = {}
    while engine.has_unfinished():
        engine.step()
        for request in engine.scheduler._running:
            for block in request.blocks[:3]:
                held.setdefault(block, set()).add(request.cache_salt)
    assert held
    assert all(len(salts) == 1 for salts in held.values())


def test_chains_of_two_salts_are_apart_in_the_tree():
    index = PrefixIndex(8, SIZE)
    ids = np.arange(9, dtype=np.int64)
    parent, blocks = index.root, []
    for start in (0, SIZE):
        blocks.append(index.blocks.allocate())
        node = index.insert(parent, ids, start, b"a")
        assert node is not None
        index.place(node, blocks[-1])
        parent = node
    assert [node.block for node in index.match(ids, b"a")] == blocks
    assert index.match(ids) == index.match(ids, b"") == index.match(ids, b"b") == []
    for block in reversed(blocks):
        index.blocks.drop(block)
    index.check()


@pytest.mark.parametrize("salt", [1, b"a", "x" * 513, "\ud800", ["a"]])
def test_what_is_no_salt(salt):
    with pytest.raises(RequestError, match="cache_salt"):
        make_engine().add_request("r", [1], SamplingParams(), cache_salt=salt)


@pytest.mark.parametrize("name", [1, [1], None, "x" * 513, "\ud800"])
def test_what_is_no_request(name):
    engine = make_engine()
    with pytest.raises(RequestError, match="request id"):
        engine.add_request(name, [1], SamplingParams())
    with pytest.raises(RequestError, match="request id"):
        engine.abort(name)
    assert not engine.has_unfinished()
