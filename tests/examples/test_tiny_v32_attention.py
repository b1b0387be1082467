"""The training code's auxiliary losses: what they measure and whom they teach."""

import torch

from examples.tiny_v32.attention import Attention, Aux, Select, rope_tables
from examples.tiny_v32.config import TinyConfig

CONFIG = TinyConfig(hidden_size=64, index_topk=8)
LENGTH = 48


def layer_and_input() -> tuple[Attention, torch.Tensor]:
    torch.manual_seed(0)
    return Attention(CONFIG), torch.randn(2, LENGTH, CONFIG.hidden_size, requires_grad=True)


def losses(layer: Attention, x: torch.Tensor, select: Select) -> tuple[torch.Tensor, torch.Tensor]:
    rope = rope_tables(CONFIG, LENGTH, x.device)
    index, spread = layer(x, rope, select, Aux.INDEX_AND_SPREAD)[1].unbind()
    return index, spread


def taught(layer: Attention) -> tuple[bool, bool]:
    """Whether the indexer and the rest of the layer got a gradient."""
    by_part = {True: False, False: False}
    for name, parameter in layer.named_parameters():
        by_part["indexer" in name] |= parameter.grad is not None and bool(parameter.grad.any())
    return by_part[True], by_part[False]


def test_the_indexers_loss_teaches_the_indexer_alone() -> None:
    layer, x = layer_and_input()
    index, _ = losses(layer, x, Select.TOPK)
    index.backward()
    assert taught(layer) == (True, False)
    assert x.grad is None or not x.grad.any()


def test_the_spread_teaches_all_but_the_indexer() -> None:
    layer, x = layer_and_input()
    _, spread = losses(layer, x, Select.TOPK)
    spread.backward()
    assert taught(layer) == (False, True)
    assert x.grad is not None
    assert x.grad.any()


def test_spread_is_the_attention_left_out() -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        assert losses(layer, x, Select.ALL)[1].abs() < 1e-6
        layer.q_b_proj.weight.zero_()  # uniform attention: a query keeps topk of its visible keys
        visible = torch.arange(1, LENGTH + 1)
        kept = visible.clamp(max=CONFIG.index_topk)
        torch.testing.assert_close(losses(layer, x, Select.TOPK)[1], (visible / kept).log().mean())


def test_the_output_does_not_depend_on_the_losses_asked_for() -> None:
    layer, x = layer_and_input()
    rope = rope_tables(CONFIG, LENGTH, x.device)
    for select in (Select.ALL, Select.TOPK):
        outs = [layer(x, rope, select, aux)[0] for aux in Aux]
        torch.testing.assert_close(outs[1], outs[0])
        torch.testing.assert_close(outs[2], outs[0])
