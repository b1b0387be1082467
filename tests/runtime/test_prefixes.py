import numpy as np

from dsa_compile.runtime.pages.prefixes import PrefixIndex

SIZE = 4


def tokens(*blocks: int, tail: int = 0) -> np.ndarray:
    """Full blocks of one repeated id each, and ``tail`` more tokens."""
    return np.array([b for b in blocks for _ in range(SIZE)] + [99] * tail, np.int64)


def store(index: PrefixIndex, ids: np.ndarray) -> list[int]:
    """Compute and leave a prompt: what it did not find is registered, everything released."""
    chain = index.match(np.append(ids, 0))
    for node in chain:
        index.blocks.hold(node.block)
    blocks = [node.block for node in chain]
    node = chain[-1] if chain else index.root
    for start in range(len(chain) * SIZE, len(ids), SIZE):
        blocks.append(index.blocks.allocate())
        node = index.insert(node, ids, start)
        index.place(node, blocks[-1])
    for block in reversed(blocks):
        index.blocks.drop(block)
    index.check()
    return blocks


def hit(index: PrefixIndex, ids: np.ndarray) -> list[int]:
    return [node.block for node in index.match(ids)]


def test_the_longest_stored_prefix_is_found():
    index = PrefixIndex(8, SIZE)
    stored = store(index, tokens(1, 2, 3))
    assert hit(index, tokens(1, 2, 3, tail=1)) == stored
    assert hit(index, tokens(1, 2, 7, tail=1)) == stored[:2]
    assert hit(index, tokens(2, 3, tail=1)) == []


def test_one_token_is_always_left_to_compute():
    index = PrefixIndex(8, SIZE)
    stored = store(index, tokens(1, 2))
    assert hit(index, tokens(1, 2)) == stored[:1]
    assert hit(index, tokens(1, 2, tail=1)) == stored
    assert hit(index, tokens(1)[:1]) == []


def test_branches_share_their_stem():
    index = PrefixIndex(8, SIZE)
    left, right = store(index, tokens(1, 2)), store(index, tokens(1, 3))
    assert left[0] == right[0]
    assert left[1] != right[1]
    assert index.blocks.num_free == 5


def test_equal_blocks_after_different_prefixes_are_different():
    index = PrefixIndex(8, SIZE)
    first, second = store(index, tokens(1, 5)), store(index, tokens(2, 5))
    assert first[1] != second[1]
    assert hit(index, tokens(2, 5, tail=1)) == second


def test_leaves_are_evicted_before_their_prefix_and_old_before_new():
    index = PrefixIndex(4, SIZE)
    old, new = store(index, tokens(1, 2)), store(index, tokens(3, 4))
    assert hit(index, tokens(1, 2, tail=1)) == old
    for expected in ([old[0]], []):
        index.blocks.allocate()
        index.check()
        assert hit(index, tokens(1, 2, tail=1)) == expected
        assert hit(index, tokens(3, 4, tail=1)) == new


def test_a_lost_page_shortens_the_hit_until_it_is_computed_again():
    index = PrefixIndex(8, SIZE)
    stored = store(index, tokens(1, 2, 3))
    index.remove(index.at(stored[1]))
    assert hit(index, tokens(1, 2, 3, tail=1)) == stored[:1]
    again = store(index, tokens(1, 2, 3))
    assert again[0] == stored[0]
    assert hit(index, tokens(1, 2, 3, tail=1)) == again
    assert index.blocks.num_free == 5


def test_tokens_registered_first_win():
    index = PrefixIndex(8, SIZE)
    first, second = index.blocks.allocate(), index.blocks.allocate()
    node = index.insert(index.root, tokens(1), 0)
    index.place(node, first)
    assert index.insert(index.root, tokens(1), 0) is node
    assert node.block == first
    index.blocks.drop(second)
    assert index.blocks.num_free == 7


def test_removing_a_prefix_forgets_everything_through_it():
    index = PrefixIndex(8, SIZE)
    stored = store(index, tokens(1, 2, 3))
    parent = index.match(tokens(1, 2, tail=1))[-1]
    index.remove(parent)
    index.check()
    assert hit(index, tokens(1, 2, 3, tail=1)) == stored[:1]
    assert (index.blocks.num_free, index.blocks.num_available) == (7, 8)
    assert not index.knows(parent)
    assert index.insert(parent, tokens(1, 2, 9), 2 * SIZE) is None


def test_chunks_are_shared_whole_or_not_at_all():
    index = PrefixIndex(16, SIZE, 2 * SIZE)
    stored = store(index, tokens(1, 2, 3, 4))
    assert hit(index, tokens(1, 2, 3, 4, tail=1)) == stored
    assert hit(index, tokens(1, 2, 3, 4)) == hit(index, tokens(1, 2, 3, tail=1)) == stored[:2]
    other = store(index, tokens(1, 2, 3, 5))
    assert other[:2] == stored[:2]
    assert not {*other[2:]} & {*stored[2:]}, "computed in one step with other tokens"
    index.remove(index.at(stored[3]))
    assert hit(index, tokens(1, 2, 3, 4, tail=1)) == stored[:2]
