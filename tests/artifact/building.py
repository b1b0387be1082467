"""A small artifact of every kind of file, made without a model."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import fx

from dsa_compile.artifact import Artifact
from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.records import (
    CacheRecord,
    KernelRecord,
    ModelRecord,
    NearMiss,
    PassSummary,
    WeightFile,
    WeightsRecord,
)
from dsa_compile.artifact.writer import ArtifactWriter
from dsa_compile.errors import ArtifactError
from dsa_compile.facts.block_quantization import BlockQuantization
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.model_spec import LayerKind, ModelSpec
from dsa_compile.ir.plan import MODEL, Call, Plan
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import TensorInfo
from dsa_compile.weights.pack import PackedFile

SPEC = ModelSpec(
    model_type="deepseek_v32",
    vocab_size=512,
    hidden_size=8,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    index_topk=16,
    index_n_heads=16,
    index_head_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    layer_kinds=("dense", "moe"),
    kinds=(LayerKind("dense", mlp="dense"), LayerKind("moe", mlp="experts")),
    index_rope_interleaved=False,
    num_nextn_predict_layers=0,
    quantization=BlockQuantization(block=(128, 128)),
    bos_token_id=None,
    eos_token_ids=(1, 2),
)


LAYERS = tuple(
    Call(f"layer_{n:03d}", kind, {"layer": f"model.layers.{n}"}, f"layer_{n:03d}", layer=n)
    for n, kind in enumerate(SPEC.layer_kinds)
)


Edit = Callable[[dict[str, Any]], object]


def region(name: str) -> Region:
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")
    weight = graph.placeholder("norm")
    hidden.meta.update(role=Role.VALUE, key="hidden", val=TensorInfo(torch.float32, ("T", 8)))
    weight.meta.update(role=Role.WEIGHT, key="norm", val=TensorInfo(torch.float32, (8,)))
    normed = graph.call_function(torch.ops.dsa.rms_norm.default, (hidden, weight, 1e-6))
    graph.output((normed,))
    return Region(name, graph, ("hidden",))


def save_model(directory: Path) -> Path:
    """A model directory: one weight file, its index, and a tokenizer."""
    directory.mkdir(exist_ok=True)
    save_file({"model.norm.weight": torch.arange(8.0)}, directory / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "tokenizer.json").write_text('{"é": 1}')
    (directory / "generation_config.json").write_text("{}")
    return directory


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(
    out: Path,
    model_dir: Path,
    mode: str = "reference",
    force: bool = False,
    note: str = "",
    before_commit: Callable[[ArtifactWriter], None] = lambda writer: None,
) -> Manifest:
    """Write an artifact; ``note`` ends up in a pass listing, to tell one build from another."""
    with ArtifactWriter(out, force) as writer:
        files: tuple[WeightFile, ...] = ()
        if mode == "reference":
            names = ("model.safetensors", "model.safetensors.index.json")
            files = tuple(WeightFile.of(model_dir, n, sha256(model_dir / n)) for n in names)
        elif mode == "pack":
            path = writer.add_dir("weights") / "layer_0.safetensors"
            save_file({"norm": torch.arange(8.0)}, path)
            files = writer.add_packed([PackedFile(path.name, path.stat().st_size, sha256(path))])
        writer.add_json("weights/plan.json", {"dense": {"norm": [1.5, None]}})
        writer.add_text("passes/00_noop/before.py", "# before\n")
        writer.add_text("passes/00_noop/after.py", f"# after {note}\n")
        manifest = Manifest.build(
            config=CompileConfig(weights=mode),
            model=ModelRecord(SPEC, "f" * 64),
            plans={MODEL: Plan(LAYERS, ("hidden",))},
            regions=tuple(
                writer.add_region(region(name)) for name in ("dense", "moe.long", "moe.short")
            ),
            kernels={"dsa.rms_norm.default": (KernelRecord("reference"),)},
            variants=("long", "short"),
            weights=WeightsRecord(
                mode=mode,
                plan="weights/plan.json",
                model_dir=str(model_dir) if mode == "reference" else None,
                files=files,
            ),
            caches=dict.fromkeys(("dense", "moe"), (CacheRecord("latent_cache", 12, "float32"),)),
            passes=(
                PassSummary(
                    name="noop",
                    numerics="bitwise",
                    rewrites=2,
                    expected=None,
                    by_region={"dense": 1, "moe.long": 1},
                    nodes_before=3,
                    nodes_after=3,
                    near_misses=(NearMiss("mlp", "add_1", "nothing came near", 1, "dense"),),
                    before="passes/00_noop/before.py",
                    after="passes/00_noop/after.py",
                    graphs=None,
                ),
            ),
            tokenizer=writer.add_tokenizer(model_dir),
        )
        before_commit(writer)
        return writer.commit(manifest)


def edit_manifest(artifact: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a manifest as a careful forger would: the digest is made to fit."""
    path = artifact / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    data.pop("digest", None)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(data))


def forge(artifact: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest fit."""
    (artifact / name).write_bytes(content)

    def fit(data: dict[str, Any]) -> None:
        record = next(file for file in data["files"] if file["path"] == name)
        record.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())

    edit_manifest(artifact, fit)


def refuses(path: Path, message: str, verify: str = "full") -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        Artifact.open(path, verify)
    assert "\n" not in str(caught.value)


def set_field(path: str, value: object) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        holder: Any = data
        for part in parents:
            holder = holder[int(part)] if part.isdecimal() else holder[part]
        holder[int(last) if last.isdecimal() else last] = value

    return edit
