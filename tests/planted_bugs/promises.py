"""Totals of the scores of planted faults, and whether they are what both commands promise."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

PLACE, SITE = 0.95, 0.90
"""Least shares of faults of which the right pass or place, and the right rewrite, is named."""

Scores = Mapping[str, dict[str, Any]]


def summary(scores: Scores) -> Iterator[str]:
    """A line for each command, and one for what the compiler refuses."""
    for command in ("verify", "bisect"):
        every = [s[command] for s in scores.values() if command in s]
        seen = [s[command] for s in scores.values() if command in s and not s["control"]]
        sited = [s for s in seen if s["site"] is not None]
        searched = ""
        if command == "bisect":
            most = max((s["trials"] for s in every), default=0)
            searched = (f"; {most} trials at most, {sum(map(_few_trials, every))} of "
                        f"{len(every)} within 2 log2(rewrites) + 4")  # fmt: skip
        yield (f"{command}: right place {sum(s['named'] for s in seen)} of {len(seen)}, right site "
               f"{sum(bool(s['site']) for s in sited)} of {len(sited)}, "
               f"{sum(bool(s['innocents']) for s in every)} accuse "
               f"innocents{searched}")  # fmt: skip
    refused = [s for s in scores.values() if "refused" in s]
    yield (f"refused {len(refused)}: {sum(s['refusal_names'] for s in refused)} name the place, "
           f"{sum('bisect' in s for s in refused)} others ran up to there")  # fmt: skip


def broken(scores: Scores) -> Iterator[str]:
    """Promises that these scores do not keep; ``verify`` says nothing of the runtime."""
    for command in ("verify", "bisect"):
        faults = [s for s in scores.values() if command in s and not s["control"]]
        if command == "verify":
            faults = [s for s in faults if s["where"] != "runtime"]
        sited = [s[command] for s in faults if s[command]["site"] is not None]
        for what, named, of, least in (
            ("place", sum(s[command]["named"] for s in faults), len(faults), PLACE),
            ("site", sum(s["site"] for s in sited), len(sited), SITE),
        ):
            if named < least * of:
                yield f"{command}: right {what} {named} of {of}, promised {least:.0%}"
        for name, s in scores.items():
            if s["control"] and command in s and s[command]["innocents"]:
                yield f"{command}: accuses the control {name}"
    for name, s in scores.items():
        if "failed" in s:
            yield f"{name}: {s['failed'].strip().splitlines()[-1]}"
        if "bisect" in s and not _few_trials(s["bisect"]):
            yield f"bisect: {s['bisect']['trials']} trials for {name}"


def _few_trials(score: Mapping[str, Any]) -> bool:
    return bool(score["trials"] <= 2 * math.log2(max(1, score["count"])) + 4)
