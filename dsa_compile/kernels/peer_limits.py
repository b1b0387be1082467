"""Sizes up to which our own collectives are used, and NCCL's from there on."""

CAPACITY = 1 << 20
"""Bytes that a rank may have for another one, 73 rows of 7,168 values in bf16: the operand of an
all-reduce, the operands of an all-gather, the other one's share of a reduce-scatter."""

_MOST_SUMMED = 640 * 1024


def most_summed(ranks: int) -> int:
    """Bytes of a rank's operand up to which an all-reduce is ours.

    Each rank sends its operand to each other one. Among four H100s 16 rows of 14 KiB take 14.4 µs
    so, NCCL 14.0, and 64 rows 37.9 and 20.6; between two of them 64 rows take 9.2 and 14.5.
    """
    return CAPACITY if ranks <= 2 else _MOST_SUMMED // (ranks - 1)


def norms_with_sum(ranks: int) -> bool:
    """Whether one kernel sums, norms and quantises.

    One block then sends a whole row to all ranks: 4.7 µs between two H100s, where the sum alone
    takes 3.9, but 8.9 among four, where it takes 4.9 and a kernel behind it some 2.
    """
    return ranks <= 2
