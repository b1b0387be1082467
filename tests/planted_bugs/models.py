"""Models that faults are planted for, written to disk once."""

import json
from pathlib import Path
from typing import Any

from tests.trained import trained_model

ROOT = Path(__file__).parents[2]
_WIDE = {
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
_BROAD = _WIDE | {"intermediate_size": 512, "moe_intermediate_size": 256, "qk_nope_head_dim": 112}
_IN_BLOCKS = {
    "hidden_size": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "index_head_dim": 128,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
}
_LAYERS: dict[str, tuple[int, dict[str, Any]]] = {
    "small": (4, {}),
    "three": (3, {"first_k_dense_replace": 1}),
    "two": (2, {"first_k_dense_replace": 1}),
    "blocks": (2, {"first_k_dense_replace": 1, **_IN_BLOCKS}),
    "wide": (4, _WIDE),
    "broad": (4, _BROAD),
}
MODELS = (
    *_LAYERS,
    "wide-fp8",
    "broad-fp8",
    "three-mtp",
    "three-glm",
    "glm",
    "trained",
    "trained-fp8",
)


def model_dir(name: str, folder: Path) -> Path:
    """The directory of a model.

    Every size of ``small`` is far below an FP8 block; ``three`` and ``two`` are that with so many
    layers, one of them dense, ``three-mtp`` has a layer that drafts. ``wide`` has several whole
    blocks of every projection, ``broad`` and ``blocks`` also of whatever two ranks share out; those
    in ``-fp8`` are as DeepSeek publishes its models, with scales that are powers of two. ``glm``
    and ``three-glm`` are small GLM-5.2, some of whose layers attend to keys that an earlier one
    selected; ``trained`` is the trained example, ``trained-fp8`` its FP8 copy.

    Args:
        name: of :data:`MODELS`.
        folder: keeps what is made.
    """
    path = folder / name
    if name == "trained" or path.exists():
        return trained_model() if name == "trained" else path
    from examples.small_models import models

    if name == "trained-fp8":
        from examples.tiny_v32.quantize_fp8 import quantize_checkpoint

        quantize_checkpoint(trained_model(), path)
    elif name.endswith("glm"):
        sizes = {"first_k_dense_replace": 1} if name == "three-glm" else {}
        count = 3 if name == "three-glm" else 6
        models.save_hf(models.tiny_model(models.tiny_glm_config(count, **sizes)), path)
    elif name == "three-mtp":
        count, sizes = _LAYERS["three"]
        models.save_hub(models.tiny_model(models.tiny_config(count, **sizes)), path, fp8=False)
    else:
        count, sizes = _LAYERS[name.removesuffix("-fp8")]
        model = models.tiny_model(models.tiny_config(count, **sizes))
        if not name.endswith("-fp8"):
            models.save_hf(model, path)
            return path
        models.save_hub(model, path)
        file = path / "config.json"
        raw = json.loads(file.read_text(encoding="utf-8"))
        raw["quantization_config"]["scale_fmt"] = "ue8m0"
        file.write_text(json.dumps(raw), encoding="utf-8")
    return path


def compile_options(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """A fault's options as :func:`dsa_compile.compile` takes them, with pages of 16 rows."""
    made = {"block_size": 16, "records": False, **dict(options)}
    parts = {name: made.pop(name) for name in ("tp", "dp", "ep", "shard_embedding") if name in made}
    if parts:
        from dsa_compile.facts.layout import Layout

        made["layout"] = Layout(**parts)
    return made
