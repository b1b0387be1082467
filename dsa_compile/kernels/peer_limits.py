"""Sizes up to which our own collectives are used, and NCCL's from there on."""

CAPACITY = 1 << 20
"""Bytes that a rank may have for another one, 73 rows of 7,168 values in bf16: the operand of an
all-reduce, the operands of an all-gather, the other one's share of a reduce-scatter."""

_MOST_SENT = 256 * 1024
_MOST_SUMMED = 1344 * 1024


def two_shots(ranks: int, nbytes: int) -> bool:
    """Whether each rank sums a share of the operands and sends the sum to the others.

    In one shot it sends its operand to each of them, which between two is as many bytes. Among four
    H100s 4 rows of 14 KiB take 3.7 µs in one shot and 4.5 in two, 8 rows 5.7 and 5.5, 64 rows 38.6
    and 13.9.

    Args:
        ranks: that meet.
        nbytes: of a rank's operand.
    """
    return ranks > 2 and nbytes * (ranks - 1) > _MOST_SENT


def norms_with_sum(ranks: int, nbytes: int) -> bool:
    """Whether one kernel sums, norms and quantises: wherever the sum takes one shot.

    Among four H100s it takes 4.1 µs for a row and 5.5 for 4, where a sum and a kernel behind it
    take 4.8 and 5.7; 8 rows take 8.8, and 7.5 with a sum in two shots. Between two it is the faster
    way up to 64 rows (11.7 and 13.0).

    Args:
        ranks: that meet.
        nbytes: of a rank's operand.
    """
    return not two_shots(ranks, nbytes)


def most_summed(ranks: int) -> int:
    """Bytes of a rank's operand up to which an all-reduce is ours.

    Among four H100s 64 rows of 14 KiB take 13.9 µs, NCCL 19.4, and 128 rows 29.3 and 26.2; between
    two of them 64 rows take 9.1 and 14.6.
    """
    return CAPACITY if ranks <= 2 else _MOST_SUMMED
