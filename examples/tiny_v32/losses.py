"""Losses of the language model and of its draft, and what is logged of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

ANSWER_WEIGHT = 4.0  # the loss weight that marks the tokens of an answer


def language_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of logits [B, S, V] against targets [B, S]; nats a token."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (loss * flat).sum() / flat.sum()


def draft_loss(drafted: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of the draft [B, S - 1, V] against the model's own next prediction.

    Row t of the draft and row t + 1 of ``logits`` [B, S, V] predict the same token, t + 2. A draft
    is accepted when it agrees with the model, so the model is its teacher, not the text.
    """
    teacher = logits[:, 1:].detach().float().softmax(-1)
    log_probs = drafted.float().log_softmax(-1)
    loss = -(teacher * log_probs).sum(-1)
    flat = weights[:, 1:]
    return (loss * flat).sum() / flat.sum()


@torch.no_grad()
def progress_figures(
    logits: Tensor, drafted: Tensor | None, targets: Tensor, weights: Tensor
) -> dict[str, float]:
    """Accuracy on answer tokens, cross-entropy on text (nats), agreement of draft and model."""
    guess = logits.argmax(-1)
    answers = weights == ANSWER_WEIGHT
    text = weights == 1.0
    right = (guess == targets)[answers].float().mean()
    entropy = F.cross_entropy(logits[text].float(), targets[text])
    figures = {"answers": right.item(), "text": entropy.item()}
    if drafted is not None:
        agree = (drafted.argmax(-1) == guess[:, 1:])[text[:, 1:]].float().mean()
        figures["draft"] = agree.item()
    return figures
