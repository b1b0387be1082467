"""Faults of what is exported."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="frequencies-without-yarn",
        about="RoPE's frequencies are those of the base alone: YaRN's interpolation is forgotten",
        file="dsa_compile/frontend/reference.py",
        old="        inv_freq = architecture.rotary(small).inv_freq.detach().clone().float()\n",
        new=(
            "        width = small.qk_rope_head_dim\n"
            "        steps = torch.arange(0, width, 2, dtype=torch.float32) / width\n"
            '        inv_freq = float(small.rope_parameters["rope_theta"]) ** -steps\n'
        ),
        kind="ir",
        culprit="build_reference",
    ),
)
