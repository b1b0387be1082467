"""Export of a model directory to a program at the EXPORTED level."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.model_spec import LayerKind, ModelSpec
from dsa_compile.frontend.architecture import Traced
from dsa_compile.frontend.architectures import architecture_of, load_config, spec_of
from dsa_compile.frontend.config_json import read_config_json
from dsa_compile.frontend.export import Input, export_region
from dsa_compile.frontend.layout_checks import check_layout
from dsa_compile.frontend.model_checks import (
    check_expert_widths,
    check_layers,
    check_recipe,
    check_target,
)
from dsa_compile.frontend.recorded_graphs import read_graph
from dsa_compile.frontend.reference import build_reference
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.plan import DEEPER, DRAFT, MODEL, Call, Plan
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.weights.canonical import template_of
from dsa_compile.weights.plan import Constant, Load, WeightEntry, WeightPlan

# Kinds of region beside those of decoder layers.
EMBED, HEAD = "embed", "head"


_BATCH_SHAPE = ("B", "S")


def load_spec(model_dir: Path) -> ModelSpec:
    """Read and validate the configuration of a model directory.

    Raises:
        ConfigError: absent, malformed, or of an architecture that is not taken.
    """
    return spec_of(load_config(read_config_json(model_dir)).to_dict())


def build_program(
    model_dir: Path,
    config: CompileConfig,
    recorded: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Program:
    """Export the reference model of ``model_dir``: one graph per layer kind, no weights read.

    Args:
        model_dir: of the model.
        config: of the compilation.
        recorded: the JSON of graphs that an earlier export of the model gave, by region, to be read
            in place of tracing the model again; None to trace it.
        sizes: fields of the configuration that are to have other values than in the directory, for
            a model with fewer experts, say; None for none.

    Raises:
        ArtifactError: ``recorded`` are not graphs of this model.
        ConfigError: the configuration is not one we take.
        UserError: the recipe is not for this model, or the layout does not divide it; see also
            :func:`program_plans`.
    """
    hf_config = load_config(read_config_json(model_dir))
    for name, size in (sizes or {}).items():
        setattr(hf_config, name, size)
    architecture = architecture_of(hf_config.to_dict())
    check_recipe(architecture.model_type, config.recipe)
    check_target(architecture.model_type, config.target)
    spec = architecture.spec(hf_config.to_dict())
    plans = program_plans(spec, config)
    kinds = tuple(dict.fromkeys(call.kind for plan in plans.values() for call in plan.layers))
    check_layout(spec, config.layout, config.recipe)
    if "experts" in {spec.kind(kind).mlp for kind in kinds}:
        widths = {name: getattr(spec, name) for name in ("hidden_size", "moe_intermediate_size")}
        check_expert_widths(config.recipe, **widths)
    reference = build_reference(architecture, hf_config, kinds, config.dtype)
    world = FakeWorld()
    inputs = {made.key: made for made in _inputs(spec, config.dtype)}
    parts: dict[str, tuple[Place, torch.nn.Module, Traced]] = {
        EMBED: (Place.PROLOGUE, reference.prologue, architecture.prologue),
        **{
            kind: (Place.LAYER, reference.layers[kind], architecture.layer(kind).traced)
            for kind in kinds
        },
        HEAD: (Place.HEAD, reference.head, architecture.head),
    }
    if DRAFT in plans:
        parts[DRAFT] = (Place.PROLOGUE, reference.draft, architecture.draft)
    # what no other region takes is not handed on
    wanted = {name for _, _, traced in parts.values() for name in traced.inputs} | {"logits"}
    if recorded is not None and recorded.keys() != parts.keys():
        raise ArtifactError(f"graphs {', '.join(recorded)}, not {', '.join(parts)}; recompile")
    regions = {}
    weights = WeightPlan()
    for kind, (_, module, traced) in parts.items():
        given = tuple(inputs[name] for name in traced.inputs)
        region = (
            export_region(kind, module, given, traced.outputs, reference.mode, world, wanted)
            if recorded is None
            else read_graph(recorded[kind], world)
        )
        _plan_weights(weights, region, reference.inv_freq)
        regions[kind] = region
    places = {kind: place for kind, (place, _, _) in parts.items()}
    return Program(spec, config, world, regions, places, plans, weights)


def _inputs(spec: ModelSpec, dtype: torch.dtype) -> tuple[Input, ...]:
    """Inputs that regions may take when they are exported, by name."""

    def value(key: str, *shape: int | str, dtype: torch.dtype = dtype) -> Input:
        return Input(Role.VALUE, key, shape, dtype)

    return (
        Input(Role.BATCH, "input_ids", _BATCH_SHAPE, torch.int64),
        Input(Role.BATCH, "positions", _BATCH_SHAPE, torch.int64),
        value("hidden", *_BATCH_SHAPE, spec.hidden_size),
        value("causal_mask", "B", 1, "S", "S", dtype=torch.bool),
        value("cos", *_BATCH_SHAPE, spec.qk_rope_head_dim),
        value("sin", *_BATCH_SHAPE, spec.qk_rope_head_dim),
        # what the last indexer selected; the reference's is narrower in a short sequence
        value("selected", *_BATCH_SHAPE, spec.index_topk, dtype=torch.int32),
        # latents that layers share, and the keys that were rotated with them
        value("latents", *_BATCH_SHAPE, spec.kv_lora_rank),
        value("latent_keys", *_BATCH_SHAPE, spec.qk_rope_head_dim),
        value("nope_latents", *_BATCH_SHAPE, spec.kv_lora_rank),
    )


def program_plans(spec: ModelSpec, config: CompileConfig) -> dict[str, Plan]:
    """The plans of a program by name: the model's, and those that draft.

    Raises:
        UserError: ``config.layers`` lies outside the model, or the model cannot draft as wanted.
    """
    plans = {MODEL: model_plan(spec, config.layers)}
    if config.draft is None:
        return plans
    layer = spec.mtp_layer
    if layer is None:
        raise UserError(
            "--draft mtp: the model has no multi-token-prediction layer "
            "(config.json: num_nextn_predict_layers is 0); compile without it"
        )
    mtp = f"model.layers.{layer}"
    own = f"{mtp}.shared_head.norm"
    owner = f"{DRAFT}_layer"
    for name, follows, norm in ((DRAFT, MODEL, "model.norm"), (DEEPER, DRAFT, own)):
        opening = {"layer": mtp, "norm": norm, "next_norm": f"{mtp}.{spec.input_norm}"}
        block = {"layer": mtp, "next_norm": own}
        kind = spec.draft_kind(deeper=name == DEEPER).name
        calls = (
            Call(name, DRAFT, opening, caches=None, layer=None),
            Call(f"{name}_layer", kind, block, caches=owner, layer=layer),
            Call(f"{name}_head", HEAD, {"norm": own}, caches=None, layer=None),
        )
        plans[name] = Plan(calls, results=("logits",), follows=follows)
    return plans


def model_plan(spec: ModelSpec, keep: tuple[int, int] | None) -> Plan:
    """The plan that computes logits: prologue, decoder layers, head.

    ``next_norm`` is the norm that follows a call: the next layer's input norm, or the model's final
    norm after the last layer.

    Args:
        spec: of the model.
        keep: the first and the last layer to run; None for all.

    Raises:
        UserError: ``keep`` lies outside the model, or its first layer attends to keys that a layer
            before it selects.
    """
    first, last = check_layers(keep, spec.num_hidden_layers)
    if not spec.kind(spec.layer_kinds[first]).indexer:
        owner = max(n for n in range(first) if spec.kind(spec.layer_kinds[n]).indexer)
        raise UserError(
            f"--layers {first}-{last}: layer {first} has no indexer, it attends to keys that layer "
            f"{owner} selects; start there"
        )
    for index in range(first, last + 1):
        kind = spec.kind(spec.layer_kinds[index])
        if kind.latents == "borrowed":
            owner = max(n for n in range(index) if _lends(spec.kind(spec.layer_kinds[n]), kind))
            if owner < first:
                raise UserError(
                    f"--layers {first}-{last}: layer {index} has no latents, it attends to those "
                    f"that layer {owner} makes; start there"
                )
    layers = []
    for index in range(first, last + 1):
        after = f"model.layers.{index + 1}.{spec.input_norm}" if index < last else "model.norm"
        names = {"layer": f"model.layers.{index}", "next_norm": after}
        name = f"layer_{index:03d}"
        layers.append(Call(name, spec.layer_kinds[index], names, caches=name, layer=index))
    opening = {"next_norm": f"model.layers.{first}.{spec.input_norm}"}
    prologue = Call(EMBED, EMBED, opening, caches=None, layer=None)
    head = Call(HEAD, HEAD, {"norm": "model.norm"}, caches=None, layer=None)
    return Plan((prologue, *layers, head), results=("logits",))


def _lends(kind: LayerKind, to: LayerKind) -> bool:
    return kind.latents == "shared" and kind.rope == to.rope


def _plan_weights(weights: WeightPlan, region: Region, inv_freq: torch.Tensor) -> None:
    for node in region.inputs_of(Role.WEIGHT):
        key, value = node.meta["key"], node.meta["val"]
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if key == "rotary_emb.inv_freq":
            expr: Constant | Load = Constant(dtype, shape, tuple(inv_freq.tolist()))
        else:
            expr = Load(template_of(key))
        weights.define(region.kind, key, WeightEntry(dtype, shape, expr))
