"""Models that faults are planted for, written to disk once."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "num_attention_heads": 4,
}
"""Whole FP8 blocks wherever the released model has them: several in a row of every projection."""

BROAD = WIDE | {
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "qk_nope_head_dim": 112,
}
"""Model with whole blocks of whatever two ranks share out, too."""

MODELS = ("small", "wide", "wide-fp8", "broad", "broad-fp8", "trained", "trained-fp8", "glm")


def model_dir(name: str, folder: Path) -> Path:
    """The directory of a model.

    ``small`` has every size far below an FP8 block; ``wide`` has whole blocks, in the layout of
    ``save_pretrained``; ``wide-fp8`` is that model as DeepSeek publishes it, with scales that are
    powers of two; ``broad`` and ``broad-fp8`` are such models that the recipes of FP8 cut over two
    ranks; ``trained`` is the trained example, ``trained-fp8`` its FP8 copy; ``glm`` is a
    small GLM-5.2, half of whose layers attend to keys that an earlier one selected.

    Args:
        name: of :data:`MODELS`.
        folder: keeps what is made.
    """
    import json

    if name == "trained":
        return ROOT / "examples" / "tiny_v32" / "checkpoint"
    path = folder / name
    if path.exists():
        return path
    if name == "trained-fp8":
        from examples.tiny_v32.quantize_fp8 import quantize_checkpoint

        quantize_checkpoint(ROOT / "examples" / "tiny_v32" / "checkpoint", path)
        return path
    from dsa_compile.testing.models import (
        save_hf,
        save_hub,
        tiny_config,
        tiny_glm_config,
        tiny_model,
    )

    if name == "glm":
        save_hf(tiny_model(tiny_glm_config(6)), path)
        return path
    sizes = {"wide": WIDE, "broad": BROAD}.get(name.removesuffix("-fp8"), {})
    config = tiny_config(4, **sizes)
    if not name.endswith("-fp8"):
        save_hf(tiny_model(config), path)
        return path
    save_hub(tiny_model(config), path)
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"]["scale_fmt"] = "ue8m0"
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return path
