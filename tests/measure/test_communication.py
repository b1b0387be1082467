"""Communication on the critical path and hidden behind other kernels, by a made-up trace."""

import pytest

from dsa_compile.measure.step.communication import communication
from dsa_compile.measure.step.timeline import Work

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_a_collective_alone_is_on_the_critical_path() -> None:
    step = [Work("gemm", 0.0, 10.0), Work(NCCL, 10.0, 16.0), Work("norm", 17.0, 20.0)]
    found = communication(step, 1)
    assert (found.launches, found.us, found.added_us, found.hidden_us) == (1, 6.0, 6.0, 0.0)
    assert found.step_us == 20.0
    assert found.share == pytest.approx(0.3)


def test_a_collective_beside_a_longer_kernel_is_hidden() -> None:
    step = [Work("experts", 0.0, 10.0), Work("all_gather", 2.0, 8.0)]
    assert communication(step, 1).hidden_us == 6.0


def test_what_reaches_beyond_the_kernel_beside_it_lengthens_the_step() -> None:
    step = [Work("experts", 0.0, 10.0), Work("reduce_scatter", 6.0, 13.0)]
    found = communication(step, 1)
    assert (found.us, found.added_us) == (7.0, 3.0)


def test_figures_are_of_one_step_of_several() -> None:
    one = [Work("gemm", 0.0, 10.0), Work("all_reduce_norm", 10.0, 14.0)]
    two = [Work(w.name, w.start + 14.0, w.end + 14.0) for w in one]
    found = communication([*two, *one], 2)
    assert (found.step_us, found.launches, found.added_us) == (14.0, 1.0, 4.0)
    assert str(found) == (
        "1 collectives in a step of 14 us: 4 us, 4 of them on the critical path (28.6%), 0 hidden"
    )


def test_a_trace_without_collectives_has_none() -> None:
    assert communication([Work("gemm", 0.0, 1.0)], 1).us == 0.0
    assert communication([], 1).share == 0.0
