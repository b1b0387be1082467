"""Graphs without a GPU: replayed, they run again what they were captured from."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dsa_compile.runtime.execution import captured_steps


def replay_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put calls in place of CUDA graphs."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    replayed = lambda run, pool, stream: SimpleNamespace(replay=run)  # noqa: E731
    monkeypatch.setattr(captured_steps, "captured_graph", replayed)
