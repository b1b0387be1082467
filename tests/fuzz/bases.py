"""Bases of mutations: a small model, and artifacts of it; made once and kept in a folder."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.fuzz.json_mutations import dump

RECIPES = ("fp32", "fp8")


def make_bases(root: Path, recipes: tuple[str, ...] = RECIPES) -> None:
    """A model, a packed artifact for each recipe, and one that refers to the model."""
    import dsa_compile
    from examples.small_models.models import save_byte_tokenizer, save_hf, tiny_config, tiny_model

    config = tiny_config(
        2, first_k_dense_replace=1, n_routed_experts=8, max_position_embeddings=256
    )
    model = root / "model"
    save_hf(tiny_model(config), model, max_shard_size="300KB")
    save_byte_tokenizer(model)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 1}')
    (model / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "add_bos_token": true}')
    (model / "chat_template.jinja").write_text("{{ messages }}")
    for recipe in recipes:
        dsa_compile.compile(model, root / recipe, recipe=recipe, weights="pack", block_size=64)
    dsa_compile.compile(model, root / "reference", recipe=recipes[0], block_size=64)


def copy(base: Path, name: str, work: Path) -> Path:
    """A copy that shares the files' contents: mutations write files anew."""
    return Path(shutil.copytree(base / name, work / name, copy_function=os.link))


def seal(artifact: Path, changed: str | None = None, data: bytes = b"") -> None:
    """Put a file into an artifact and make the manifest fit, as a careful forger does."""
    from tests.fuzz.file_mutations import replace

    path = artifact / "manifest.json"
    manifest = json.loads(path.read_bytes())
    if changed is not None:
        replace(artifact / changed, data)
        for record in _records(manifest, changed):
            record.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
            if record.get("header_sha256"):
                length = int.from_bytes(data[:8], "little")
                record["header_sha256"] = hashlib.sha256(data[8 : 8 + length]).hexdigest()
    replace(path, sealed(manifest))


def sealed(manifest: Any) -> bytes:
    """A manifest's text with digests that fit, where it can have any."""
    if isinstance(manifest, dict):
        try:
            if isinstance(manifest.get("compile"), dict):
                options = json.dumps(manifest["compile"], sort_keys=True, allow_nan=False)
                manifest["compile_digest"] = hashlib.sha256(options.encode()).hexdigest()
            rest = {key: value for key, value in manifest.items() if key != "digest"}
            text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
            manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
        except ValueError:  # NaN
            pass
    return dump(manifest)


def _records(manifest: Any, path: str) -> list[dict[str, Any]]:
    found = [record for record in manifest["files"] if record["path"] == path]
    name = path.removeprefix("weights/")
    return found + [record for record in manifest["weights"]["files"] if record["name"] == name]
