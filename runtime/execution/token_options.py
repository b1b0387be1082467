"""Records of sampling options as words on a device; see ``OPTIONS``."""

import torch
from torch import Tensor

STEP = 4
"""The word of a record of sampling options that counts a request's tokens."""

ROW = 0
"""The word of 32 bits of such a record that says where its token is kept."""


def options_at(options: Tensor, ahead: Tensor | int) -> Tensor:
    """Records of sampling options for tokens that are ``ahead`` behind those of the records."""
    made = options.clone()
    made[..., STEP] += ahead
    return made


def options_of_drafts(options: Tensor, ahead: Tensor | int, rows: Tensor) -> Tensor:
    """Variant of :func:`options_at` for records ``[Y, 5]`` whose tokens are kept in ``rows``."""
    made = options_at(options, ahead)
    made.view(torch.int32)[:, ROW] = rows
    return made
