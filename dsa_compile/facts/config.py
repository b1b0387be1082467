"""Options of a compilation: the user's choices, frozen and hashed whole."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dsa_compile.common.names import one_of
from dsa_compile.errors import UserError
from dsa_compile.facts.gpus import AUTO, choose_target
from dsa_compile.facts.layout import ONE_RANK, Layout

# `dsa-compile --help` prints the choices below and should not wait for torch.
if TYPE_CHECKING:
    import torch

GPUS = ("sm_90a", "sm_100a")
TARGETS = ("cpu", *GPUS)
_MACHINES = {
    AUTO: "the GPU here",
    "cpu": "any machine",
    "sm_90a": "Hopper: H100, H200",
    "sm_100a": "Blackwell: B200",
}
WEIGHT_MODES = ("reference", "pack", "none")
# The compute dtype of each recipe, before any quantisation. A few parameters stay fp32 whatever
# the recipe: see ``dsa_compile.weights.canonical``.
RECIPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp8": "bfloat16",
    "fp8-kv-tensor": "bfloat16",
}
# Those with FP8 weights and activations; they differ in the rows of the latent cache.
FP8_RECIPES = ("fp8", "fp8-kv-tensor")
DRAFTS = ("mtp",)
# Guesses of a step; more than the published models are trained for gain nothing.
MOST_DRAFTS = 4
# Peers' kernels page by 64 rows; smaller pages divide it and share finer prefixes.
BLOCK_SIZES = (16, 32, 64)


_LEAST_SCALE = 2.0**-64  # of keys and values: beyond it products leave fp32


@dataclass(frozen=True)
class AddedPass:
    """A pass from outside the package.

    Attributes:
        name: in the pipeline.
        where: its class, as ``"module:Class"``.
        after: name of the pass or level that it runs after.
        package: name and version of the package that adds it; empty for a pass handed to
            :func:`dsa_compile.compile`.
    """

    name: str
    where: str
    after: str
    package: str = ""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Options of one compilation; :func:`dsa_compile.compile` takes the same.

    Making one checks what can be checked without the model. Sequences may be lists, and paths
    :class:`~pathlib.Path`; they are kept as tuples and as text.

    Args:
        target: the machine the artifact is for (:data:`TARGETS`). ``auto`` becomes the target of
            this machine's first GPU, or ``cpu`` where there is none.
        recipe: numerics (:data:`RECIPES`).
        weights: where the weights live: ``reference`` names the model's files and their hashes,
            ``pack`` copies them re-laid out, ``none`` leaves them out.
        layers: first and last layer to keep (inclusive), or None for all.
        block_size: rows of one cache page.
        disable: names of passes to skip. ``"name+"`` stands for a pass and all that need it.
        stop_after: name of the last pass to run, or None.
        kernels: providers to use for ops, each as ``"op=provider"``.
        records: keep what each pass did, for ``dsa-inspect``.
        kv_scale: of the latent cache in recipe ``fp8-kv-tensor``: a value is stored as e4m3 of
            itself over the scale, so magnitudes above 448 times it saturate. One for all layers.
        profile: file of times of calls measured on the target, from which ``overlap_streams``
            plans; None to plan from estimates.
        pass_options: options of passes, each as ``"pass.name=value"``.
        added_passes: those added from outside the package, in the order in which they were put in.
        compiled_kernels: ship machine code of the CUDA kernels, if NVRTC is installed here;
            without, they are compiled on loading.
        draft: ``mtp`` adds plans that draft tokens with the model's multi-token-prediction layer;
            None for an artifact without drafts of its own.
        num_speculative_tokens: tokens that an engine drafts for each request in a step unless it is
            loaded with another number, 1 to 4; None for 1.
        layout: the ranks that run the model together; its JSON is left out for a single one.
    """

    target: str = AUTO
    recipe: str = "fp32"
    weights: str = "reference"
    layers: tuple[int, int] | None = None
    block_size: int = 64
    disable: tuple[str, ...] = ()
    stop_after: str | None = None
    kernels: tuple[str, ...] = ()
    records: bool = True
    kv_scale: float = 1.0
    profile: str | None = None
    pass_options: tuple[str, ...] = ()
    added_passes: tuple[AddedPass, ...] = ()
    compiled_kernels: bool = True
    draft: str | None = None
    num_speculative_tokens: int | None = None
    layout: Layout = field(default=ONE_RANK, metadata={"optional": True})

    def __post_init__(self) -> None:
        self._normalise()
        if self.target not in TARGETS:  # "gpu" is near to "cpu", and is not meant by it
            known = ", ".join(f"{name} ({machine})" for name, machine in _MACHINES.items())
            raise UserError(f"unknown target {self.target!r}; choose one of {known}")
        one_of("recipe", self.recipe, RECIPES)
        one_of("weights", self.weights, WEIGHT_MODES)
        if self.block_size not in BLOCK_SIZES:
            choices = ", ".join(map(str, BLOCK_SIZES))
            raise UserError(f"unknown block size {self.block_size}; choose one of {choices}")
        if self.layers is not None and not (len(self.layers) == 2 and self.layers[0] >= 0):
            raise UserError(f"layers {self.layers} should be the first and the last to keep")
        if self.draft is not None:
            one_of("draft", self.draft, DRAFTS)
        count = self.num_speculative_tokens
        if count is not None and not (type(count) is int and 1 <= count <= MOST_DRAFTS):
            raise UserError(f"num_speculative_tokens={count!r} must be from 1 to {MOST_DRAFTS}")
        if count is not None and self.draft is None:
            raise UserError("num_speculative_tokens needs a way to draft: --draft mtp")
        if not _LEAST_SCALE <= self.kv_scale <= 1 / _LEAST_SCALE:
            raise UserError(
                f"kv scale {self.kv_scale} is not a positive number from {_LEAST_SCALE:g} to "
                f"{1 / _LEAST_SCALE:g}"
            )
        if self.kv_scale != 1.0 and self.recipe != "fp8-kv-tensor":
            raise UserError(f"recipe {self.recipe} takes no kv scale; fp8-kv-tensor does")

    def _normalise(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.target == AUTO:
            put("target", choose_target()[0])
        for name in ("layers", "disable", "kernels", "pass_options", "added_passes"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UserError(f"{name}={value!r} should be a list, such as [{value!r}]")
            if isinstance(value, list):
                put(name, tuple(value))
        if self.profile is not None:
            put("profile", os.fspath(self.profile))

    @property
    def dtype(self) -> "torch.dtype":
        """Compute and cache dtype of the recipe."""
        import torch

        dtype: torch.dtype = getattr(torch, RECIPES[self.recipe])
        return dtype

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        options = asdict(self)
        if self.layout == ONE_RANK:
            del options["layout"]
        return json.loads(json.dumps(options))  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Hex SHA-256 over every option."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
