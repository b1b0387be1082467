"""Binary search for the first bad rewrite, kept in a file so that it can be interrupted."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import UserError

STATE = "bisect.json"


class NothingBadError(UserError):
    """The check passes with all rewrites."""


@dataclass(frozen=True)
class Trial:
    """One program tried.

    Attributes:
        position: how many rewrites it had.
        bad: whether the check failed.
        detail: the check's result, as text.
    """

    position: int
    bad: bool
    detail: str


@dataclass
class Log:
    """The trials of one search.

    Attributes:
        key: identifies the search: the artifact, the check, the numbers.
        path: the file that they are kept in, or None.
        trials: in the order made.
        resumed: how many of them an earlier run made.
    """

    key: str
    path: Path | None = None
    trials: list[Trial] = field(default_factory=list)
    resumed: int = 0

    @classmethod
    def open(cls, key: str, path: Path) -> "Log":
        """Go on with the search of a file, if it is the same; else begin anew.

        With a mended pass it is another search: the trials of the last one are of no use and
        written over.

        Raises:
            UserError: the file is no file of a search.
        """
        log = cls(key, path)
        if not path.exists():
            return log
        try:
            data = json.loads(read_regular(path).decode())
            known = [Trial(int(t["position"]), bool(t["bad"]), str(t["detail"]))
                     for t in data["trials"]]  # fmt: skip
            found = data["key"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            raise UserError(
                f"{path}: not the state of a search; remove it to start again"
            ) from None
        if found != key:
            return log
        log.trials, log.resumed = known, len(known)
        return log

    def known(self, position: int) -> Trial | None:
        """The trial of a position, if it was made."""
        return next((trial for trial in self.trials if trial.position == position), None)

    def add(self, trial: Trial) -> None:
        """Keep a trial; it is on disk when this returns."""
        self.trials.append(trial)
        if self.path is None:
            return
        data: dict[str, Any] = {"key": self.key, "trials": [vars(t) for t in self.trials]}
        draft = self.path.with_suffix(".part")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)


def first_bad(
    count: int,
    check: Callable[[int], Trial],
    log: Log,
    progress: Callable[[Trial], None],
    subject: str = "the artifact as it is compiled",
) -> int:
    """The number of the first rewrite with which the check fails; 0 if it fails without any.

    The first trial is of all rewrites, the second of none; ⌈log2(count)⌉ more are made.

    Args:
        count: rewrites in all.
        check: tries a program with its first so many rewrites.
        log: the trials; those in it are not made again.
        progress: called with each trial, also with those known.
        subject: what the check runs with all rewrites.

    Raises:
        NothingBadError: the check passes with all rewrites.
    """

    def bad(position: int) -> bool:
        trial = log.known(position)
        if trial is None:
            trial = check(position)
            log.add(trial)
        progress(trial)
        return trial.bad

    if not bad(count):
        raise NothingBadError(
            f"the check passes on {subject} ({log.trials[-1].detail}): there is nothing to bisect"
        )
    if count == 0 or bad(0):
        return 0
    good, wrong = 0, count
    while wrong - good > 1:
        middle = (good + wrong) // 2
        if bad(middle):
            wrong = middle
        else:
            good = middle
    return wrong
