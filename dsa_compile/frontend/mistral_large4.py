"""Mistral-Large-4: its row in the table of models, and the kinds of its layers.

Apart from :mod:`dsa_compile.frontend.architectures`, since older versions of transformers have none
of these classes: importing this module then fails.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import MistralLarge4TextConfig
from transformers.models.mistral_large4.modeling_mistral_large4 import (
    MistralLarge4TextRotaryEmbedding,
)

from dsa_compile.errors import ConfigError
from dsa_compile.facts.model_spec import Latents, LayerKind
from dsa_compile.frontend.architecture import TAKES, Architecture, Traced, TracedLayer
from dsa_compile.frontend.sharing_modules import CappedHead, SharingLayer, WithHead

_SUFFIXES: dict[Latents, str] = {"own": "", "shared": "_lend", "borrowed": "_borrow"}
# Values that hand latents on: layers that rotate do it apart from those that do not.
_LATENTS = {1: ("latents", "latent_keys"), 0: ("nope_latents",)}


def _layers() -> Iterator[TracedLayer]:
    """Kinds of every layer: its MLP, whether it rotates, whose latents and selection it uses."""
    for latents, indexer, rope, mlp in itertools.product(
        _SUFFIXES, ("full", "shared"), (1, 0), ("dense", "sparse")
    ):
        name = "dense" if mlp == "dense" else "moe"
        name += ("" if rope else "_nope") + _SUFFIXES[latents]
        name += "" if indexer == "full" else "_reuse"
        kind = LayerKind(
            name, "dense" if mlp == "dense" else "experts", indexer == "full", rope == 1, latents
        )
        config: dict[str, str | int] = {
            "mlp_layer_types": mlp,
            "indexer_types": indexer,
            "no_rope_layers": rope,
        }
        takes: tuple[str, ...] = () if kind.indexer else ("selected",)
        takes += _LATENTS[rope] if latents == "borrowed" else ()
        gives: tuple[str, ...] = ("selected",) if kind.indexer else ()
        gives += _LATENTS[rope] if latents == "shared" else ()
        yield TracedLayer(
            kind,
            {**config, "kv_source_layers": latents},
            Traced(
                partial(SharingLayer, kind=kind, takes=takes),
                (*TAKES, "positions", *takes),
                ("hidden", *gives),
            ),
        )


def _whose_latents(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Origin of each layer's latents: its own, shared with others, or borrowed.

    The reference hands on one set of latents of layers that rotate, and one of those that do not.

    Raises:
        ConfigError: a layer would attend there to other latents than ``kv_source_layers`` says.
    """
    sources, ropes = config["kv_source_layers"], config["no_rope_layers"]
    last: dict[int, int] = {}
    found = []
    for layer, (source, rope) in enumerate(zip(sources, ropes, strict=False)):
        if source != layer:
            if last.get(rope) != source:
                raise ConfigError(
                    f"config.json: kv_source_layers says that layer {layer} attends to latents of "
                    f"layer {source}, its reference model in transformers takes those of "
                    f"{last.get(rope, 'none')}: of the last layer whose latents are shared, among "
                    "those that no_rope_layers has alike"
                )
            found.append("borrowed")
        elif layer in sources[layer + 1 :]:
            last[rope] = layer
            found.append("shared")
        else:
            found.append("own")
    return {"kv_source_layers": found}


def _one_source(kinds: Sequence[LayerKind]) -> dict[str, list[int]]:
    """Sources for one layer of each kind; which layer lends is nothing that is traced."""
    return {"kv_source_layers": [0 if k.latents == "borrowed" else i for i, k in enumerate(kinds)]}


MISTRAL_LARGE4 = Architecture(
    model_type="mistral_large4_text",
    config=MistralLarge4TextConfig,
    model=WithHead,
    rotary=MistralLarge4TextRotaryEmbedding,
    layers=tuple(_layers()),
    index_rope_interleaved=True,
    when_null={"norm_topk_prob": True},  # it always divides
    facts={
        "router_bias": False,
        "scaled_queries": True,
        "learned_frequencies": True,
        "other_parts": (
            *("vision_encoder.", "patch_merger.", "pre_mm_projector_norm."),
            *("vision_language_adapter.", "mtp_dspark."),
        ),
    },
    derived=_whose_latents,
    small=_one_source,
    extra_fields=(
        *("num_experts", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
        "no_rope_layer_interval",
    ),
    head=Traced(CappedHead, ("hidden",), ("logits",)),
)
