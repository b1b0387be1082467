import numpy as np
import pytest

from dsa_compile.runtime.scheduling.block_pool import BlockPool
from dsa_compile.runtime.scheduling.prefix_cache import PrefixCache

SIZE = 4


def tokens(*blocks: int, tail: int = 0) -> np.ndarray:
    """Full blocks of one repeated id each, and ``tail`` more tokens."""
    return np.array([b for b in blocks for _ in range(SIZE)] + [99] * tail, np.int64)


def store(cache: PrefixCache, ids: np.ndarray) -> list[int]:
    """Compute and leave a prompt: what it did not find is registered, everything released."""
    chain = cache.match(np.append(ids, 0))
    for node in chain:
        cache.pool.acquire(node.block)
    blocks = [node.block for node in chain]
    node = chain[-1] if chain else cache.root
    for start in range(len(chain) * SIZE, len(ids), SIZE):
        blocks.append(cache.pool.allocate())
        node = cache.insert(node, ids, start, blocks[-1])
    for block in reversed(blocks):
        cache.pool.release(block)
    cache.check()
    return blocks


def hit(cache: PrefixCache, ids: np.ndarray) -> list[int]:
    return [node.block for node in cache.match(ids)]


def test_the_longest_stored_prefix_is_found():
    cache = PrefixCache(8, SIZE)
    stored = store(cache, tokens(1, 2, 3))
    assert hit(cache, tokens(1, 2, 3, tail=1)) == stored
    assert hit(cache, tokens(1, 2, 7, tail=1)) == stored[:2]
    assert hit(cache, tokens(2, 3, tail=1)) == []


def test_one_token_is_always_left_to_compute():
    cache = PrefixCache(8, SIZE)
    stored = store(cache, tokens(1, 2))
    assert hit(cache, tokens(1, 2)) == stored[:1]
    assert hit(cache, tokens(1, 2, tail=1)) == stored
    assert hit(cache, tokens(1)[:1]) == []


def test_branches_share_their_stem():
    cache = PrefixCache(8, SIZE)
    left, right = store(cache, tokens(1, 2)), store(cache, tokens(1, 3))
    assert left[0] == right[0]
    assert left[1] != right[1]
    assert len(cache) == 3


def test_equal_blocks_after_different_prefixes_are_different():
    cache = PrefixCache(8, SIZE)
    first, second = store(cache, tokens(1, 5)), store(cache, tokens(2, 5))
    assert first[1] != second[1]
    assert hit(cache, tokens(2, 5, tail=1)) == second


def test_leaves_are_evicted_before_their_prefix_and_old_before_new():
    cache = PrefixCache(4, SIZE)
    old, new = store(cache, tokens(1, 2)), store(cache, tokens(3, 4))
    assert hit(cache, tokens(1, 2, tail=1)) == old
    for expected in ([old[0]], []):
        cache.pool.allocate()
        cache.check()
        assert hit(cache, tokens(1, 2, tail=1)) == expected
        assert hit(cache, tokens(3, 4, tail=1)) == new


@pytest.mark.parametrize("drop", [BlockPool.drop_latent_page, BlockPool.drop_index_page])
def test_a_lost_page_shortens_the_hit_until_it_is_computed_again(drop):
    cache = PrefixCache(8, SIZE)
    stored = store(cache, tokens(1, 2, 3))
    drop(cache.pool, stored[1])
    assert hit(cache, tokens(1, 2, 3, tail=1)) == stored[:1]
    again = store(cache, tokens(1, 2, 3))
    assert again[0] == stored[0]
    assert hit(cache, tokens(1, 2, 3, tail=1)) == again
    assert cache.pool.num_cached == len(cache) == 3


def test_tokens_registered_first_win():
    cache = PrefixCache(8, SIZE)
    first, second = cache.pool.allocate(), cache.pool.allocate()
    node = cache.insert(cache.root, tokens(1), 0, first)
    assert cache.insert(cache.root, tokens(1), 0, second) is node
    assert node is not None
    assert node.block == first
    cache.pool.release(second)
    assert cache.pool.num_free == 7


def test_removing_a_prefix_forgets_everything_through_it():
    cache = PrefixCache(8, SIZE)
    stored = store(cache, tokens(1, 2, 3))
    parent = cache.match(tokens(1, 2, tail=1))[-1]
    cache.remove(stored[1])
    cache.check()
    assert hit(cache, tokens(1, 2, 3, tail=1)) == stored[:1]
    assert (cache.pool.num_free, cache.pool.num_cached) == (7, 1)
    assert cache.insert(parent, tokens(1, 2, 9), 2 * SIZE, cache.pool.allocate()) is None
    cache.remove(stored[1])
    assert len(cache) == 1


def test_chunks_are_shared_whole_or_not_at_all():
    cache = PrefixCache(16, SIZE, 2 * SIZE)
    stored = store(cache, tokens(1, 2, 3, 4))
    assert hit(cache, tokens(1, 2, 3, 4, tail=1)) == stored
    assert hit(cache, tokens(1, 2, 3, 4)) == hit(cache, tokens(1, 2, 3, tail=1)) == stored[:2]
    other = store(cache, tokens(1, 2, 3, 5))
    assert other[:2] == stored[:2]
    assert not {*other[2:]} & {*stored[2:]}, "computed in one step with other tokens"
    cache.remove(stored[3])
    assert hit(cache, tokens(1, 2, 3, 4, tail=1)) == stored[:2]
