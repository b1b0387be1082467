"""Drafts that are right more rarely than when the artifact was evaluated.

Wrong drafts leave tokens right, so a wrong state or cache row shows in nothing but this share. Two
intervals are compared, that of the drafts of late and that of the recorded ones, each as wide as
:data:`DEVIATIONS` standard deviations of answers and not of drafts: those of one answer are right
or wrong together. Nothing is reported while the intervals meet.
"""

import logging

from dsa_compile.artifact.acceptance import AcceptanceRecord, Counted

DEVIATIONS = 5.0
"""Half the width of each interval: shares are compared after every step, for a long time."""

_WINDOW = 4096  # first drafts that count as those of late; older ones lose their weight
_LOG = logging.getLogger("dsa_compile.runtime")


class AcceptanceWatch:
    """Compares the drafts that steps check with a record.

    Args:
        record: of the artifact.

    Attributes:
        problem: a sentence while fewer drafts are right than recorded, else empty.
    """

    def __init__(self, record: AcceptanceRecord) -> None:
        self._recorded = {sampled: record.lowest(sampled) for sampled in (False, True)}
        self._late = {sampled: _Late() for sampled in (False, True)}
        self.problem = ""

    def add(self, sampled: bool, drafted: int, accepted: int) -> None:
        """Note the drafts of one request in one step.

        Args:
            sampled: whether the request draws its tokens.
            drafted: how many drafts.
            accepted: how many of them were right.
        """
        self._late[sampled].add(drafted, accepted)
        before, self.problem = self.problem, self._find()
        if self.problem and not before:
            _LOG.warning("%s", self.problem)

    def _find(self) -> str:
        for sampled, recorded in self._recorded.items():
            for depth, (now, then) in enumerate(
                zip(self._late[sampled].counted(recorded), recorded, strict=False), start=1
            ):
                if now.bounds(DEVIATIONS)[1] < then.bounds(DEVIATIONS)[0]:
                    return (
                        f"drafts are right too rarely: {now.accepted / now.drafts:.0%} of the last "
                        f"{now.drafts} at depth {depth}, {then.accepted / then.drafts:.0%} when "
                        f"the artifact was evaluated ({'sampled' if sampled else 'greedy'} "
                        "answers): requests are of another kind, or drafting sees wrong states; "
                        "dsa-inspect ARTIFACT draft and dsa-eval --only mtp tell"
                    )
        return ""


class _Late:
    """Drafts of late, by depth: half of each count is dropped when the first reaches the window."""

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        for counts, deep in ((self._drafted, drafted), (self._accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for place in range(deep):
                counts[place] += 1
        if self._drafted[0] >= _WINDOW:
            self._drafted = [count // 2 for count in self._drafted]
            self._accepted = [count // 2 for count in self._accepted]

    def counted(self, recorded: tuple[Counted, ...]) -> list[Counted]:
        """Counts of late at each recorded depth; answers vary as they did in the record."""
        both = zip(self._drafted, self._accepted, recorded, strict=False)
        return [Counted(n, min(n, right), then.dispersion) for n, right, then in both if n]
