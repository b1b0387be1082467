"""Run an artifact's graphs over paged caches."""

from collections.abc import Mapping
from dataclasses import fields

import torch

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.errors import UserError
from dsa_compile.ir.calls import EMBED, HEAD, step_calls
from dsa_compile.ir.region import Region, Role
from dsa_compile.runtime.batch import Batch
from dsa_compile.runtime.devices import device_of
from dsa_compile.runtime.executor import BoundRegion, bind

LONG, SHORT = "long", "short"
_BATCH_FIELDS = tuple(field.name for field in fields(Batch))


class ModelRunner:
    """A :class:`~dsa_compile.runtime.runner.Runner` over an artifact.

    Owns both paged caches of every layer, ``[num_blocks, block_size, width]`` each under one block
    id: ``caches`` has them by key for each layer, for those who move pages. What a page holds
    before a request writes its rows does not matter, NaN included.

    Args:
        manifest: of the artifact.
        regions: its graphs by name.
        weights: for each call of a step (``embed``, each layer in order, ``head``) the weights by
            key, on the target's device.
        num_blocks: blocks of each cache.

    Raises:
        ArtifactError: this machine is not the target.
        UserError: the caches do not fit into memory.
    """

    def __init__(
        self,
        manifest: Manifest,
        regions: Mapping[str, Region],
        weights: list[Mapping[str, torch.Tensor]],
        num_blocks: int,
    ) -> None:
        spec = manifest.model.spec
        self._device = device_of(manifest.target)
        self.num_blocks = num_blocks
        self.block_size = manifest.block_size
        self.vocab_size = spec.vocab_size
        self.max_model_len = spec.max_position_embeddings
        self.eos_token_ids = spec.eos_token_ids
        self._topk = spec.index_topk
        kinds = [call.kind for call in step_calls(manifest.layers)]
        inner = [kind not in (EMBED, HEAD) for kind in kinds]
        caches = [self._make_caches(manifest) if layer else {} for layer in inner]
        self.caches = tuple(cache for cache in caches if cache)
        functions = {
            name: bind(region, manifest.kernels, manifest.target)
            for name, region in regions.items()
        }
        self._calls: dict[str, list[BoundRegion]] = {}
        for variant in manifest.variants or (LONG,):
            names = [n if (n := f"{kind}.{variant}") in regions else kind for kind in kinds]
            self._calls[variant] = [
                BoundRegion(
                    regions[name], functions[name], {Role.WEIGHT: weight, Role.CACHE: cache}
                )
                for name, weight, cache in zip(names, weights, caches, strict=True)
            ]

    def _make_caches(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        made = {}
        for cache in manifest.caches:
            shape = (self.num_blocks, self.block_size, cache.width)
            try:
                made[cache.key] = torch.zeros(
                    shape, dtype=getattr(torch, cache.dtype), device=self._device
                )
            except RuntimeError:  # what torch raises when the system refuses the memory
                raise UserError(
                    f"num_blocks={self.num_blocks}: no memory for {cache.key} pages of "
                    f"{self.block_size} x {cache.width} in every layer; use fewer blocks"
                ) from None
        return made

    @torch.inference_mode()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Run one step; see :meth:`Runner.execute`.

        The short graphs run when no request's context exceeds ``index_topk``.
        """
        short = SHORT in self._calls and batch.is_short(self._topk)
        tensors = {
            name: torch.from_numpy(getattr(batch, name)).to(self._device) for name in _BATCH_FIELDS
        }
        calls = self._calls[SHORT if short else LONG]
        for call in calls[:-1]:
            call.run(tensors)
        if not len(batch.logit_rows):
            return torch.empty((0, self.vocab_size))
        calls[-1].run(tensors)
        return tensors["logits"].float().cpu()
