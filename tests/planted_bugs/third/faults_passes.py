"""Faults of passes."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="absorb-values-before-keys",
        about="the values' rows of kv_b are taken for the keys', and the other way round",
        file="passes/absorb_mla.py",
        old="cuts = {W_UK: (0, dn), W_UV: (dn, dv)}",
        new="cuts = {W_UK: (dv, dn), W_UV: (0, dv)}",
        kind="pass",
        culprit="absorb_mla",
        recipe="bf16",
    ),
    Fault(
        id="skip-padding-forgets-groups",
        about="the router that knows padding has all experts in one group",
        file="passes/skip_padding.py",
        old="args = (*router.args[:8], *(router.args[8:9] or (0,)), slots, *router.args[10:])",
        new=(
            "args = (*router.args[:3], 1, 1, *router.args[5:8], *(router.args[8:9] or (0,)), "
            "slots, *router.args[10:])"
        ),
        kind="pass",
        culprit="skip_padding",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="control-merged-in-another-order",
        about="the merged low ranks stand in another order, in the weight and in the split",
        file="passes/merge_projections.py",
        old="names = [name for name in _FIRST if has[name]]",
        new="names = [name for name in reversed(_FIRST) if has[name]]",
        kind="pass",
        culprit="",
        recipe="bf16",
        control=True,
    ),
    Fault(
        id="control-experts-numbered-by-remainder",
        about="an expert's number on its rank is its remainder",
        file="passes/shard_experts.py",
        old="expert - rank * own if expert // own == rank else -1",
        new="expert % own if expert // own == rank else -1",
        kind="pass",
        culprit="",
        options=(("tp", 2), ("ep", 2)),
        control=True,
    ),
    Fault(
        id="router-remade-without-its-scale",
        about="the router that takes the shared expert forgets the routed scale",
        file="passes/merge_shared_expert.py",
        old="edit.call(dsa.router.default, *old.args[:8], 1, *old.args[9:], before=old)",
        new="edit.call(dsa.router.default, *old.args[:7], 1.0, 1, *old.args[9:], before=old)",
        kind="pass",
        culprit="merge_shared_expert",
        site=1,
        layers=(2, 3),
    ),
)
