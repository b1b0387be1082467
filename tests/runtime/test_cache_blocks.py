import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.runtime.pages.blocks import Blocks


def make(num_blocks: int) -> tuple[Blocks, list[int]]:
    """Some blocks, and those evicted so far."""
    evicted: list[int] = []
    return Blocks(num_blocks, evicted.append), evicted


def test_a_block_is_free_then_owned_then_cached_or_free():
    blocks, _ = make(3)
    kept, lost = blocks.allocate(), blocks.allocate()
    assert (blocks.num_free, blocks.num_available, blocks.num_owned) == (1, 1, 2)
    blocks.know(kept)
    blocks.drop(kept)
    blocks.drop(lost)
    assert (blocks.num_free, blocks.num_available, blocks.num_owned) == (2, 3, 0)
    assert blocks.is_cached(kept)
    assert not blocks.is_cached(lost)
    blocks.check()


def test_sharing_keeps_a_block_until_its_last_owner_leaves():
    blocks, _ = make(1)
    block = blocks.allocate()
    blocks.hold(block)
    blocks.drop(block)
    assert blocks.num_owned == 1
    blocks.drop(block)
    assert blocks.num_free == 1


def test_free_blocks_go_first_then_the_longest_cached():
    blocks, evicted = make(3)
    first, second, third = (blocks.allocate() for _ in range(3))
    for block in (second, first):
        blocks.know(block)
        blocks.drop(block)
    blocks.drop(third)
    assert blocks.allocate() == third
    assert evicted == []
    assert blocks.allocate() == second
    assert blocks.allocate() == first
    assert evicted == [second, first]


def test_taking_a_cached_block_back_saves_it_from_eviction():
    blocks, _ = make(2)
    first, second = blocks.allocate(), blocks.allocate()
    for block in (first, second):
        blocks.know(block)
        blocks.drop(block)
    blocks.hold(first)
    assert blocks.allocate() == second
    assert blocks.num_available == 0


def test_a_forgotten_block_is_freed_now_or_with_its_last_owner():
    blocks, _ = make(2)
    owned, cached = blocks.allocate(), blocks.allocate()
    for block in (owned, cached):
        blocks.know(block)
    blocks.drop(cached)
    blocks.forget(cached)
    blocks.forget(owned)
    assert (blocks.num_free, blocks.num_available, blocks.num_owned) == (1, 1, 1)
    blocks.drop(owned)
    assert blocks.num_free == 2
    blocks.check()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_block_is_not_handed_out_while_its_pages_are_copied(forgotten):
    blocks, _ = make(2)
    block = blocks.allocate()
    blocks.know(block)
    blocks.move(block)
    blocks.drop(block)
    assert (blocks.num_leaving, blocks.num_available) == (1, 1)
    if forgotten:
        blocks.forget(block)
    blocks.check()
    blocks.settle(block)
    assert (blocks.num_leaving, blocks.num_available) == (0, 2)
    assert blocks.is_cached(block) == (not forgotten)
    blocks.check()


def test_misuse_is_caught():
    blocks, _ = make(1)
    block = blocks.allocate()
    blocks.drop(block)
    with pytest.raises(AssertionError, match="dropped twice"):
        blocks.drop(block)
    with pytest.raises(AssertionError, match="cannot be shared"):
        blocks.hold(block)
    with pytest.raises(AssertionError, match="without an owner"):
        blocks.know(block)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=60))
def test_any_sequence_keeps_the_invariants(num_blocks, actions):
    blocks, _ = make(num_blocks)
    references: dict[int, int] = {}
    moving: set[int] = set()
    for action, choice in actions:
        owned = sorted(references)
        cached = [block for block in range(num_blocks) if blocks.is_cached(block)]
        if action == 0 and blocks.num_available:
            block = blocks.allocate()
            assert block not in references.keys() | moving
            references[block] = 1
        elif action == 1 and cached:
            blocks.hold(cached[0])
            references[cached[0]] = 1
        elif action == 2 and moving:
            blocks.settle(moving.pop())
        elif owned:
            block = owned[choice % len(owned)]
            if action == 2:
                blocks.hold(block)
                references[block] += 1
            elif action == 3:
                blocks.know(block)
            elif action == 4:
                blocks.forget(block)
            elif action == 5 and block not in moving:
                blocks.move(block)
                moving.add(block)
            else:
                blocks.drop(block)
                references[block] -= 1
                if not references[block]:
                    del references[block]
        blocks.check()
        assert blocks.num_owned == len(references)
        assert blocks.num_leaving == len(moving - references.keys())
        assert all(blocks.references(b) == references.get(b, 0) for b in range(num_blocks))
