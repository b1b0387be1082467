"""The reference model, built without memory, one decoder layer of each kind.

Everything is made under a fake-tensor mode: a full-geometry layer costs nothing, and the device
that tracing bakes into ``arange`` or ``zeros`` is the one the graphs will run on.
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from dsa_compile.errors import ConfigError
from dsa_compile.frontend.architecture import Architecture
from dsa_compile.frontend.architectures import refused
from dsa_compile.ir.dims import fake_mode
from dsa_compile.weights.canonical import compute_dtype


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
