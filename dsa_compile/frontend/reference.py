"""The reference model, built without memory, one decoder layer of each kind.

Everything is made under a fake-tensor mode: a full-geometry layer costs nothing, and the device
that tracing bakes into ``arange`` or ``zeros`` is the one the graphs will run on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from dsa_compile.errors import CheckpointError, CompileError, ConfigError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.frontend.architecture import Architecture
from dsa_compile.frontend.architectures import architecture_of, load_config, refused
from dsa_compile.frontend.config_json import read_config_json
from dsa_compile.ir.dims import fake_mode
from dsa_compile.weights.canonical import canonical_parameters, compute_dtype


@dataclass(frozen=True)
class Reference:
    """Modules to trace, and the fake mode they live in."""

    prologue: torch.nn.Module
    layers: dict[str, torch.nn.Module]  # by kind
    head: torch.nn.Module
    draft: torch.nn.Module
    mode: FakeTensorMode
    inv_freq: torch.Tensor  # real, fp32 [qk_rope_head_dim / 2]


def build_reference(
    architecture: Architecture,
    config: PreTrainedConfig,
    kinds: tuple[str, ...],
    dtype: torch.dtype,
) -> Reference:
    """Instantiate one layer of each of ``kinds`` at full geometry, holding no memory.

    Parameters get the dtypes the reference keeps them in: ``dtype``, and fp32 for those that
    :func:`dsa_compile.weights.canonical.compute_dtype` names.

    Raises:
        ConfigError: transformers cannot make RoPE's frequencies of the configuration, or not finite
            ones.
    """
    try:
        small = architecture.config(**{**config.to_dict(), **architecture.config_of(kinds)})
        inv_freq = architecture.rotary(small).inv_freq.detach().clone().float()
    except Exception as error:  # a parameter of RoPE of another type or size
        raise refused(error) from None
    if not torch.isfinite(inv_freq).all():
        raise ConfigError(
            "config.json: RoPE's frequencies are not finite; see rope_theta and the scaling of RoPE"
        )
    # scaled_dot_product_attention and the grouped GEMM leave short, regular graphs; the eager
    # experts loop over data and cannot be exported
    small._attn_implementation = "sdpa"
    small._experts_implementation = "grouped_mm"
    mode = fake_mode()
    with mode:
        model = architecture.model(small).eval()
        draft = architecture.draft.module(model).eval()
        for name, parameter in (*model.named_parameters(), *draft.named_parameters()):
            router = not architecture.facts.get("router_bias", True)
            parameter.data = parameter.data.to(compute_dtype(name, dtype, router))
    return Reference(
        architecture.prologue.module(model),
        {
            kind: architecture.layer(kind).traced.module(layer)
            for kind, layer in zip(kinds, model.model.layers, strict=True)
        },
        architecture.head.module(model),
        draft,
        mode,
        inv_freq,
    )


def parameter_shapes(config: PreTrainedConfig, model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a class of transformers by name; no memory is taken."""
    with torch.device("meta"):
        made = model._from_config(config, attn_implementation="sdpa")
    return {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}


@contextmanager
def frontend_faults_named(
    model_dir: Path, spec: ModelSpec, layers: Sequence[int]
) -> Iterator[None]:
    """Before weights are refused, make sure that transformers wants what the frontend wants.

    A fault of the frontend looks like a download that is not complete.

    Args:
        model_dir: of the model.
        spec: of the model, as the frontend reads it.
        layers: whose weights are looked for.

    Raises:
        CompileError: in place of a CheckpointError, where the parameters of the two differ.
    """
    try:
        yield
    except CheckpointError:
        if wrong := wrong_parameter(model_dir, spec, layers):
            raise CompileError(f"{wrong}: a fault of the frontend, not of the weights") from None
        raise


def wrong_parameter(model_dir: Path, spec: ModelSpec, layers: Sequence[int]) -> str:
    """The first parameter that the frontend looks for and transformers' model has not got.

    Args:
        model_dir: of the model.
        spec: of the model, as the frontend reads it.
        layers: to look at; transformers has none beyond the decoder.

    Returns:
        What differs; empty if nothing does, or if transformers makes no such model.
    """
    has: dict[str, tuple[int, ...]] = {}
    with suppress(Exception):  # what it refuses, it says nothing of
        raw = read_config_json(model_dir)
        has = parameter_shapes(load_config(raw), architecture_of(raw).model)
    inside = [layer for layer in layers if layer < spec.num_hidden_layers]
    for name, wanted in canonical_parameters(spec, inside).items() if has else ():
        if has.get(name) != wanted.shape:
            there = f"has it as {list(has[name])}" if name in has else "has none of that name"
            return f"{name!r} is expected as {list(wanted.shape)}, and transformers' model {there}"
    return ""
