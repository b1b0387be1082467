"""Faults in how weights are made from the checkpoint."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="requantised-scale-rounded-up",
        about="values are quantised with a scale that is then rounded up",
        file="dsa_compile/weights/block_fp8.py",
        old="    return values, scale",
        new="    return values, torch.exp2(torch.ceil(torch.log2(scale)))",
        kind="weight",
        culprit="quantize_rows",
        recipe="fp8",
        echo="sgl-project/sglang#28418",
    ),
    Fault(
        id="experts-in-text-order",
        about="experts are read in the order of their names: 0, 1, 10, 11, 2",
        file="dsa_compile/weights/layout.py",
        old='            key = f"{prefix}.{expert}.{projection}.weight"',
        new=(
            '            key = f"{prefix}.{sorted(range(experts), '
            'key=str)[expert]}.{projection}.weight"'
        ),
        kind="weight",
        culprit="mlp.experts",
    ),
    Fault(
        id="head-weights-in-bf16",
        about="the indexer's head weights are rounded to bf16",
        file="dsa_compile/weights/canonical.py",
        old=(
            '_FP32_SUFFIXES = (".indexer.weights_proj.weight", ".mlp.gate.e_score_correction_bias")'
        ),
        new='_FP32_SUFFIXES = (".mlp.gate.e_score_correction_bias",)',
        kind="weight",
        culprit="self_attn.indexer.weights_proj.weight",
        recipe="bf16",
        echo="huggingface/transformers#42580",
        compiles=True,
    ),
    Fault(
        id="e4m3-to-240",
        about="requantised blocks are scaled to 240, and dequantised for 448",
        file="dsa_compile/weights/block_fp8.py",
        old="    tiles /= scale[:, None, :, None]",
        new="    tiles /= scale[:, None, :, None] * (448.0 / 240.0)",
        kind="weight",
        culprit="quantize_rows",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="stacked-scales-swapped",
        about="the up projection's scales lie before the gate's",
        file="dsa_compile/weights/layout.py",
        old="        above = self.number * height",
        new=(
            "        swapped = block > 1 and self.expert is not None\n"
            "        above = abs(swapped * (rows.stop // height - 1) - self.number) * height"
        ),
        kind="weight",
        culprit="mlp.experts.gate_up_proj",
        recipe="fp8",
        model="wide-fp8",
    ),
    Fault(
        id="parts-from-the-first-row",
        about="an expert's gate and up are both written from the first row",
        file="dsa_compile/weights/checkpoint.py",
        old=("target = out[part.expert - experts.start, first - rows.start : last - rows.start]"),
        new="target = out[part.expert - experts.start, 0 : last - first]",
        kind="weight",
        culprit="mlp.experts.gate_up_proj",
        recipe="bf16",
    ),
    Fault(
        id="control-scale-in-two-steps",
        about="values are multiplied by their reciprocal scale",
        file="dsa_compile/weights/stored.py",
        old="values *= scales[first // height - base]",
        new="values.mul_(scales[first // height - base])",
        kind="weight",
        culprit="",
        recipe="bf16",
        model="wide-fp8",
        control=True,
    ),
    Fault(
        id="rope-frequencies-rounded",
        about="RoPE's frequencies are kept to three decimals",
        file="dsa_compile/frontend/build.py",
        old="tuple(inv_freq.tolist())",
        new="tuple(round(f, 3) for f in inv_freq.tolist())",
        kind="weight",
        culprit="rotary_emb.inv_freq",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="scales-of-another-block",
        about=("a window that begins within a block takes its scales from its own first row"),
        file="dsa_compile/weights/stored.py",
        old="values *= scales[first // height - base]",
        new="values *= scales[(first - rows.start) // height]",
        kind="weight",
        culprit="self_attn.w_uk",
        recipe="bf16",
        model="wide-fp8",
    ),
    Fault(
        id="scale-grid-transposed",
        about="the grid of scales is read columns first",
        file="dsa_compile/weights/stored.py",
        old=("home.read_elements(part.scale_key, rows.start * width, scale)\n        return scale"),
        new=(
            "home.read_elements(part.scale_key, rows.start * width, scale)\n"
            "        return scale.t().reshape(scale.shape)"
        ),
        kind="weight",
        culprit="_scales",
        recipe="fp8",
        model="wide-fp8",
        echo="vllm-project/vllm#47116",
    ),
    Fault(
        id="divided-by-scale-inv",
        about="FP8 values are divided by weight_scale_inv",
        file="dsa_compile/weights/stored.py",
        old="values *= scales[first // height - base]",
        new="values /= scales[first // height - base]",
        kind="weight",
        culprit="_read_blocks",
        recipe="bf16",
        model="wide-fp8",
        echo="deepseek-ai/DeepSeek-V3#2",
    ),
    Fault(
        id="expert-parts-up-first",
        about="an expert's up projection is read into the gate's rows",
        file="dsa_compile/weights/layout.py",
        old='projections = ("gate_proj", "up_proj")',
        new='projections = ("up_proj", "gate_proj")',
        kind="weight",
        culprit="mlp.experts.gate_up_proj",
        recipe="fp8-kv-tensor",
    ),
)
