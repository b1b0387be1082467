"""Faults as the caller of a step gets them, and what is left of the step."""

import pytest
import torch

from dsa_compile.runtime import DeviceLost, StepError
from tests.runtime.hash_runner import reference_tokens

from .async_runner import NO_MEMORY
from .test_step_pipeline import VOCAB, greedy, make_engine, run

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice")


def two_requests():
    engine, runner = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(6, ignore_eos=True))
    engine.add_request("b", [4, 5], greedy(6, ignore_eos=True))
    return engine, runner


def raising(error):
    def fail(*args):
        raise error

    return fail


def finish(engine):
    done = run(engine)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        assert done[name].token_ids == reference_tokens(prompt, 6, VOCAB)


def test_an_op_that_fails_for_everybody_fails_each_alone():
    engine, runner = two_requests()
    engine.step()
    launch = runner.launch
    runner.launch = raising(StepError("layer 3, region moe.long: dsa.experts failed: …"))
    done = run(engine)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        assert done[name].finish_reason == "error"
        want = f"request {name!r}: layer 3, region moe.long: dsa.experts failed: …"
        assert done[name].error == want
        known = done[name].token_ids
        assert known == reference_tokens(prompt, 6, VOCAB)[: len(known)]
    assert engine.stats().op_failures >= 3, "together, then each"
    runner.launch = launch
    assert engine.generate([[1]], greedy(3))[0].token_ids == reference_tokens([1], 3, VOCAB)


def test_a_fault_that_passes_costs_nobody_a_token():
    engine, runner = two_requests()
    engine.step()
    launch = runner.launch

    def once(inputs):
        runner.launch = launch
        raise StepError("a refused call")

    runner.launch = once
    finish(engine)
    assert engine.stats().op_failures == 1


def test_an_error_of_the_gpu_seen_at_a_launch_is_told_as_such():
    engine, runner = two_requests()
    launch = runner.launch
    runner.launch = raising(ILLEGAL)
    with pytest.raises(DeviceLost) as raised:
        engine.step()
    assert str(raised.value).startswith(
        "the GPU failed: CUDA error: an illegal memory access was encountered. It was noticed at "
        "or after what is to blame, for kernels run while the host goes on: while a step was "
    )
    assert "--debug-launches" in str(raised.value)
    assert raised.value.__cause__ is ILLEGAL
    assert raised.value.request_ids == ("a", "b")
    runner.launch = launch  # as if it could be: nothing is lost on the host's side
    finish(engine)


def test_a_lost_device_seen_when_tokens_are_waited_for():
    engine, _ = two_requests()
    engine.step()
    engine._pipeline._in_flight[0].tokens.wait = raising(ILLEGAL)
    with pytest.raises(DeviceLost, match="the tokens of a step were waited for") as raised:
        engine.step()
    assert raised.value.__cause__ is ILLEGAL
    assert raised.value.request_ids == ("a", "b")
    assert not engine.scheduler._in_flight
    engine.scheduler.check()
    finish(engine)


@pytest.mark.parametrize("error", [StepError("refused"), torch.OutOfMemoryError(NO_MEMORY)])
def test_another_fault_seen_then_is_taken_apart(error):
    engine, _ = two_requests()
    engine.step()
    engine._pipeline._in_flight[0].tokens.wait = raising(error)
    assert engine.step() == []
    assert not engine.scheduler._in_flight
    engine.scheduler.check()
    finish(engine)
    stats = engine.stats()
    assert (stats.memory_failures, stats.op_failures) in {(1, 0), (0, 1)}


def test_other_errors_pass_as_they_are():
    engine, runner = two_requests()
    error, launch = KeyError("a bug"), runner.launch
    runner.launch = raising(error)
    with pytest.raises(KeyError) as raised:
        engine.step()
    assert raised.value is error
    assert error.__cause__ is None
    runner.launch = launch
    finish(engine)
