"""Lists of requests in the order of their rank: priority, then arrival."""

from bisect import bisect_left, insort

from dsa_compile.runtime.scheduling.request import Request


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def insert_ranked(requests: list[Request], request: Request) -> None:
    """Put a request in its place."""
    insort(requests, request, key=_rank)


def remove_ranked(requests: list[Request], request: Request) -> None:
    """Take a request out, which must be there."""
    index = bisect_left(requests, request.rank, key=_rank)
    assert requests[index] is request, "requests are sorted by rank"
    del requests[index]


def is_ranked(requests: list[Request]) -> bool:
    """Whether a list is in order."""
    return requests == sorted(requests, key=_rank)
