"""Comparison of a fault's results with the right package's, and whether a difference matters."""

from typing import Any

OWN_ERROR = {"fp32": 1e-4, "bf16": 0.05, "fp8": 0.2, "fp8-kv-tensor": 0.2}
"""Error of each recipe's logits against fp32's, which a fault is measured by."""


def judge(right: dict[str, Any], found: dict[str, Any], noise: float) -> dict[str, Any]:
    """``outcome``: ``refused``, ``harmful``, ``subtle`` (below the recipe's own error), or
    ``harmless``; with the figures for it.
    """
    if "error" in found:
        return {"outcome": "refused", "stage": "process", "message": found["error"]}
    told = compare(right, found) if set(found) & {"steps", "streams", "generated"} else {}
    if "refused" in found:
        line = " ".join(str(found["refused"]).split())[:160]
        # what runs on streams raises where a stream is too early
        outcome = "harmful" if found["stage"] == "streams" else "refused"
        return {"outcome": outcome, "stage": found["stage"], "message": line, **told}
    outcome = "harmless"
    if told["error"] > noise or told["tokens"]:
        outcome = "harmful"
    elif told["error"] > 1e-5 or told["logprobs"]:
        outcome = "subtle"
    return {"outcome": outcome, "own_error": round(noise, 6), **told}


def compare(right: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Largest error of a step relative to its logits' spread, which steps, which generations."""
    import torch

    errors: dict[str, float] = {}
    steps = dict(found.get("steps", {}))
    for name, logits in steps.items():
        wanted = right["steps"].get(name)
        if wanted is None:  # fewer steps have drafted as much
            continue
        if logits.shape != wanted.shape or not bool(logits.isfinite().all()):
            errors[name] = float("inf")
        elif len(logits):
            errors[name] = float((logits - wanted).norm() / (wanted - wanted.mean(-1, True)).norm())
    for name, values in found.get("streams", {}).items():
        serial = found["streams"][f"{name.rsplit(' ', 2 if ' first' in name else 1)[0]} serial"]
        for key, value in values.items():
            same = value is not None and torch.equal(
                value.contiguous().view(torch.uint8), serial[key].contiguous().view(torch.uint8)
            )
            if not same:
                errors[name] = float("inf")
    tokens: dict[str, list[int]] = {}
    scores = []
    for name, outputs in found.get("generated", {}).items():
        wanted = right["generated"][name]
        unlike = [i for i, (a, b) in enumerate(zip(outputs, wanted, strict=True)) if a[0] != b[0]]
        if unlike or len(outputs) != len(wanted):
            tokens[name] = unlike
        elif any(
            abs(a - b) > 1e-3
            for mine, other in zip(outputs, wanted, strict=True)
            for a, b in zip(mine[1], other[1], strict=True)
        ):
            scores.append(name)
    worst = max(errors.values(), default=0.0)
    return {
        "error": min(worst, 1e9) if worst == worst else 1e9,
        "steps": [name for name, error in errors.items() if error > 0],
        "tokens": tokens,
        "logprobs": scores,
    }
