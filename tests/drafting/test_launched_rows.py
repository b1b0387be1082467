"""Engines whose padded steps derive their rows as on a GPU, with the kernels emulated."""

from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import draft_rows as kernels
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.execution import model_runner
from dsa_compile.runtime.execution.padded_rows import launched_rows
from tests.kernels import emulator

from .conftest import MakeEngine

PLACES = ((0, 12), (700, 30), (1500, 5))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    if not emulator.available():
        pytest.skip("needs g++")
    names: list[str] = []

    def launch(kernel: CudaKernel, *args: Any) -> None:
        names.append(kernel.name)
        emulator.launch(kernel, *args)

    monkeypatch.setattr(CudaKernel, "__call__", launch)
    monkeypatch.setattr(kernels, "_THREADS", 32)
    return names


def generated(engine: Any, text: list[int]) -> Any:
    prompts = [text[start : start + length] for start, length in PLACES]
    sampled = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "top_k": 40}, {}]
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, **{"temperature": 0.0, **some})
        for count, some in zip((24, 17, 20), sampled, strict=True)
    ]
    outputs = engine.generate(prompts, params)
    stats = engine.stats()
    return [output.token_ids for output in outputs], stats.drafted, stats.accepted


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_tokens_and_drafts_are_the_same(
    make_engine: MakeEngine,
    text: list[int],
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    engine = make_engine(count, "mtp", padded=True)
    wanted = generated(engine, text)
    assert not emulated
    monkeypatch.setattr(model_runner, "padded_rows", launched_rows)
    engine = make_engine(count, "mtp", padded=True)
    assert generated(engine, text) == wanted
    assert sum(wanted[2]) > 10
    steps = emulated.count("start_rows")
    assert len(emulated) == 3 * steps > 0
