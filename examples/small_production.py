"""Write a small random model that takes the options of production: ``--recipe fp8 --tp 2 --ep 2``.

    python examples/small_production.py demo/v32
    python examples/small_production.py demo/glm --family glm

The directory looks like the published DeepSeek-V3.2 or GLM-5.2: FP8 blocks of 128 × 128 in several
files with an index, the MTP layer that drafts, a tokenizer, and the chat format with its tags. What
two ranks share is whole blocks. The same seed gives the same bytes; the text is random.
"""

import argparse
import json
import tempfile
from pathlib import Path

from small_models.models import save_hub, tiny_config, tiny_glm_config, tiny_model
from small_models.tokenizer import with_tags

EXAMPLES = Path(__file__).parent
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 256,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "index_n_heads": 16, "index_head_dim": 128, "index_topk": 64, "vocab_size": 1536,
    "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {"deepseek": (tiny_config, "tiny_v32_fp8"), "glm": (tiny_glm_config, "tiny_glm")}


def write_model(directory: Path, family: str, layers: int, seed: int) -> None:
    """Write the model; ``directory`` must not exist, and appears whole or not at all."""
    make, like = FAMILIES[family]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        whole = Path(temporary, "model")
        save_hub(tiny_model(make(layers, **SIZES), seed=seed), whole, seed=seed)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            content = json.loads((EXAMPLES / like / "checkpoint" / name).read_text())
            if family == "deepseek" and name == "tokenizer.json":
                content = with_tags(content, ["｜DSML｜"])
            if family == "deepseek":  # its own format, with tools, is built in
                content.pop("chat_template", None)
            (whole / name).write_text(json.dumps(content, ensure_ascii=False))
        whole.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where to write the model; must not exist")
    parser.add_argument("--family", choices=FAMILIES, default="deepseek")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    args = parser.parse_args()
    if args.directory.exists():
        parser.error(f"{args.directory} exists; remove it or choose another")
    write_model(args.directory, args.family, args.layers, args.seed)
    size = sum(file.stat().st_size for file in args.directory.iterdir())
    print(f"{args.directory}: a random model of {args.layers} layers, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
