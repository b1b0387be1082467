"""What the caller of a step hears of a fault, and what is left of the step."""

import pytest
import torch

from dsa_compile.runtime import DeviceLost, OutOfMemory, StepError
from dsa_compile.testing.hash_runner import reference_tokens

from .async_runner import NO_MEMORY
from .test_pipeline import VOCAB, greedy, make_engine, run

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice")


def two_requests():
    engine, runner = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(6, ignore_eos=True))
    engine.add_request("b", [4, 5], greedy(6, ignore_eos=True))
    return engine, runner


def raising(error):
    def fail(batch):
        raise error

    return fail


def finish(engine):
    done = run(engine)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        assert done[name].token_ids == reference_tokens(prompt, 6, VOCAB)


def test_an_op_that_fails_at_launch_names_the_requests_of_its_step():
    engine, runner = two_requests()
    engine.step()
    error, forward = StepError("layer 3, region moe.long: dsa.experts failed: …"), runner.forward
    runner.forward = raising(error)
    assert [output.request_id for output in engine.step()] == ["a", "b"], "of the step before it"
    with pytest.raises(StepError) as raised:
        engine.step()
    assert raised.value is error
    assert error.request_ids == ("a", "b")
    runner.forward = forward
    finish(engine)


def test_an_error_of_the_gpu_seen_at_a_launch_is_told_as_such():
    engine, runner = two_requests()
    forward = runner.forward
    runner.forward = raising(ILLEGAL)
    with pytest.raises(DeviceLost) as raised:
        engine.step()
    assert str(raised.value).startswith(
        "the GPU failed: CUDA error: an illegal memory access was encountered. It was noticed at "
        "or after what is to blame, for kernels run while the host goes on: while a step was "
    )
    assert "--debug-launches" in str(raised.value)
    assert raised.value.__cause__ is ILLEGAL
    assert raised.value.request_ids == ("a", "b")
    runner.forward = forward  # as if it could be: nothing is lost on the host's side
    finish(engine)


@pytest.mark.parametrize(
    ("error", "kind"), [(ILLEGAL, DeviceLost), (torch.OutOfMemoryError(NO_MEMORY), OutOfMemory)]
)
def test_an_error_seen_when_tokens_are_waited_for(error, kind):
    engine, _ = two_requests()
    engine.step()
    launched = engine._pipeline._in_flight[0].tokens
    launched.wait = lambda: raising(error)(None)
    with pytest.raises(kind, match="the tokens of a step were waited for") as raised:
        engine.step()
    assert raised.value.__cause__ is error
    assert raised.value.request_ids == ("a", "b")
    assert not engine.scheduler._in_flight
    engine.scheduler.check()
    finish(engine)


def test_other_errors_pass_as_they_are():
    engine, runner = two_requests()
    error, forward = KeyError("a bug"), runner.forward
    runner.forward = raising(error)
    with pytest.raises(KeyError) as raised:
        engine.step()
    assert raised.value is error
    assert error.__cause__ is None
    runner.forward = forward
    finish(engine)
