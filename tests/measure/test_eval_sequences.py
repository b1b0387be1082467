from dsa_compile.measure.eval.sequences import packed, whole_batch


def test_a_batch_of_whole_sequences():
    batch = whole_batch([[5, 6, 7], [8], [1, 2]], tails=[1, 0, 2], block_size=2)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.block_tables.tolist() == [[0, 1], [2, -1], [3, -1]]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 4, 6, 7]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.context_lens.tolist() == [3, 1, 2]
    assert batch.logit_rows.tolist() == [2, 4, 5]


def test_packing_counts_whole_blocks():
    # 3, 4 and 5 tokens take 4, 4 and 8 rows
    assert list(packed([3, 4, 5], block_size=4, budget=8)) == [slice(0, 2), slice(2, 3)]
    assert list(packed([3, 4, 5], block_size=4, budget=16)) == [slice(0, 3)]
    assert list(packed([3, 4, 5], block_size=4, budget=4)) == [
        slice(0, 1), slice(1, 2), slice(2, 3),
    ]  # fmt: skip
    assert list(packed([], block_size=4, budget=4)) == []
