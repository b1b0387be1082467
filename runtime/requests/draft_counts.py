"""Drafts of a request, or of an engine, and how many were right."""


class DraftCounts:
    """Drafts by depth, counted step by step."""

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one request in one step."""
        for counts, depth in ((self.drafted, drafted), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for place in range(depth):
                counts[place] += 1
