"""Packed layouts of a step's arrays."""

import numpy as np
import pytest
import torch

from dsa_compile.runtime.execution.pinned_staging import Layout, StagingRing


def test_arrays_come_back_from_the_packed_buffer() -> None:
    arrays = {
        "a": np.arange(7, dtype=np.int64),
        "empty": np.zeros((0,), np.int32),
        "b": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    layout = Layout.of(arrays)
    host = np.full(layout.nbytes + 100, 255, np.uint8)
    for name, view in layout.in_numpy(host).items():
        view[...] = arrays[name]
    found = layout.in_torch(torch.from_numpy(host))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert found["a"].dtype is torch.int64
    assert found["b"].dtype is torch.int32
    assert (host[layout.nbytes :] == 255).all()


def test_arrays_start_where_kernels_may_read_wide() -> None:
    layout = Layout(dict.fromkeys("abc", ((3,), np.int32)))
    starts = [place.start for place in layout.places.values()]
    assert starts == [0, 256, 512]
    assert layout.nbytes == 768


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> StagingRing:
    """Two buffers of ordinary memory, whose copies are done at once."""

    class Done:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **more: empty(*size, **more))
    monkeypatch.setattr(torch.cuda, "Event", Done)
    return StagingRing(depth=2, nbytes=256)


def test_views_are_of_the_buffer_that_is_sent(ring: StagingRing) -> None:
    """Also of one that was made again, larger, since its views were."""
    small, large = (Layout({"a": ((count,), np.int64)}) for count in (3, 70_000))
    first: dict[int, object] = {}
    for step in range(8):
        layout = large if step in (4, 5) else small
        views = ring.take_views(layout)
        views["a"][:] = step
        target = torch.zeros(layout.nbytes, dtype=torch.uint8)
        ring.send(target)
        assert layout.in_torch(target)["a"].unique().tolist() == [step]
        if step in (0, 1):
            first[step] = views
        if step in (2, 3):
            assert views is first[step % 2], "made anew"


def test_a_buffer_without_views_is_sent_as_it_was_filled(ring: StagingRing) -> None:
    layout = Layout({"a": ((3,), np.int64)})
    ring.take_views(layout)["a"][:] = 1
    ring.send(torch.zeros(layout.nbytes, dtype=torch.uint8))
    ring.take(512)[:] = 7
    target = torch.zeros(512, dtype=torch.uint8)
    ring.send(target)
    assert target.unique().tolist() == [7]
