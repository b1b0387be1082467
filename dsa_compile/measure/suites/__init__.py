"""Suites of measurements: one module an area, each with a function ``plans()``."""

import importlib
from collections.abc import Iterator

from dsa_compile.measure.case import Plan

SUITES = (
    "topk",
    "topk_families",
    "index_logits",
    "mla_decode",
    "attention_expand",
    "mla_prefill",
    "prompt_attention",
    "gemm_fp8",
    "experts",
    "router",
    "elementwise",
    "head_products",
    "glm",
    "sampling",
    "copies",
)


def all_plans() -> Iterator[tuple[str, Plan]]:
    """Plans of all suites, each with the name of its suite; no inputs are made."""
    for suite in SUITES:
        module = importlib.import_module(f"{__name__}.{suite}")
        for plan in module.plans():
            yield suite, plan
