"""Ctrl-C at any line of the runtime leaves an engine that goes on, and no token is lost."""

import random
import signal
import sys
import threading

import pytest

from dsa_compile import runtime
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.failures.interrupts import Uninterrupted
from tests.runtime.hash_runner import HashRunner, reference_tokens

from .async_runner import AsyncHashRunner
from .drafting_runner import DraftingRunner

FOLDER = runtime.__path__[0]
SIZE = 4
VOCAB = 64
PARAMS = SamplingParams(max_tokens=7, temperature=0.0)
PROMPTS = {f"r{n}": [n % 2 + 1] * (3 + 2 * n) for n in range(5)}


class Expired(Exception):
    """The end of a time limit."""


def expire(number, frame):
    raise Expired


@pytest.fixture(autouse=True)
def handler():
    """Python's own, which a process in the background has not, and one of a time limit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, expire)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGALRM, alarm)


class Interrupts:
    """Calls functions of the runtime and sends a signal after random numbers of its lines."""

    def __init__(self, seed, longest):
        self.chance, self.longest = random.Random(seed), longest
        self.left = self.chance.randint(1, longest)
        self.count = 0

    def call(self, function, *args):
        """Result of ``function``, or None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return function(*args)
        except (KeyboardInterrupt, Expired):
            self.count += 1
            return None
        finally:
            sys.settrace(before)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.left = self.chance.randint(1, self.longest)
                signal.raise_signal(self.chance.choice((signal.SIGINT, signal.SIGALRM)))
        return self.trace


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("runner", [HashRunner, AsyncHashRunner, DraftingRunner])
def test_an_interrupted_engine_goes_on(runner, seed):
    made = runner(14, SIZE, VOCAB)
    engine = Engine(
        made, EngineOptions(max_num_batched_tokens=8, async_scheduling=made.rows_ahead > 0)
    )
    interrupts = Interrupts(seed, longest=1500 + 40 * seed)
    known = {}
    for name, prompt in PROMPTS.items():
        while name not in engine.scheduler.requests:
            interrupts.call(engine.add_request, name, prompt, PARAMS)
        request = engine.scheduler.requests[name]
        known[name] = request, engine._live[request]
        engine.scheduler.check()
    for number in range(2000):
        if not engine.has_unfinished():
            break
        interrupts.call(engine.drain if number % 7 == 6 else engine.step)
        engine.scheduler.check()
        if number == 4:
            interrupts.call(engine.abort, "r3")
    assert interrupts.count > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGALRM) is expire
    assert not engine.has_unfinished()
    assert engine.stats().owned_blocks == 0
    for name, (request, generation) in known.items():
        want = reference_tokens(PROMPTS[name], 7, VOCAB)
        if request.finish_reason == "abort":
            want = want[: len(request.output_ids)]
        else:
            assert request.finish_reason == "length"
        assert request.output_ids == generation.transcript.token_ids == want, name
        assert generation.sampling.generated == len(want)


@pytest.mark.parametrize("seed", range(12))
def test_generate_may_be_called_again(seed):
    engine = Engine(AsyncHashRunner(14, SIZE, VOCAB), EngineOptions(async_scheduling=True))
    interrupts = Interrupts(seed, longest=4000)
    prompts = list(PROMPTS.values())
    outputs = None
    for _ in range(100):
        outputs = interrupts.call(engine.generate, prompts, PARAMS)
        if outputs is not None:
            break
    if outputs is None:
        outputs = engine.generate(prompts, PARAMS)
    assert [o.token_ids for o in outputs] == [reference_tokens(p, 7, VOCAB) for p in prompts]
    assert not engine._live
    assert engine.stats().owned_blocks == 0


class AtInstruction:
    """Sends SIGINT before one instruction of the engine's own functions; counts all of them."""

    files = ("runtime/engine.py", "runtime/output_stream.py")

    def __init__(self, number=None):
        self.number, self.count = number, 0

    def __enter__(self):
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks here whether any are wanted
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                signal.raise_signal(signal.SIGINT)
        return self.trace


def short(tokens=2, prompts=1):
    return [[1, 2, 3]] * prompts, SamplingParams(max_tokens=tokens, temperature=0.0)


def run_generate(engine):
    engine.generate(*short(prompts=2))


def run_stream(engine):
    (prompt,), params = short(3)
    list(engine.stream(prompt, params))


def leave_stream(engine):
    (prompt,), params = short(9)
    with engine.stream(prompt, params) as stream:
        next(stream)


def drop_stream(engine):
    (prompt,), params = short(9)
    next(engine.stream(prompt, params))


@pytest.mark.parametrize("call", [run_generate, run_stream, leave_stream, drop_stream])
def test_an_interrupt_at_any_instruction_leaves_an_idle_engine(monkeypatch, call):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # of __del__; pytest's keeps streams
    made = AsyncHashRunner(14, SIZE, VOCAB)
    counting = AtInstruction()
    with counting:
        call(Engine(made, EngineOptions(async_scheduling=True)))
    assert counting.count > 100
    for number in range(1, counting.count + 1):
        engine = Engine(AsyncHashRunner(14, SIZE, VOCAB), EngineOptions(async_scheduling=True))
        try:
            with AtInstruction(number):
                call(engine)
        except KeyboardInterrupt:
            pass
        found = []
        thread = threading.Thread(target=lambda: found.append(engine.generate(*short())))  # noqa: B023
        thread.start()
        thread.join()
        assert [output.token_ids for output in found[0]] == [reference_tokens([1, 2, 3], 2, VOCAB)]
        assert not engine._live
        assert engine.stats().owned_blocks == 0


def test_a_stream_goes_on_after_an_interrupt_and_ends(monkeypatch):
    """No instruction has it wait for a last output that is lost."""
    step = Engine.step
    (prompt,), params = short(3)
    number = 0
    interrupted = True
    while interrupted:
        number += 1
        engine = Engine(AsyncHashRunner(14, SIZE, VOCAB), EngineOptions(async_scheduling=True))
        stream = engine.stream(prompt, params)
        steps = iter(range(50))
        monkeypatch.setattr(
            engine, "step", lambda made=engine, left=steps: (next(left), step(made))
        )
        outputs = []
        at = AtInstruction(number)
        try:
            with at:
                outputs.extend(stream)
        except KeyboardInterrupt:
            outputs.extend(stream)
        interrupted = at.count >= number
        found = [token for output in outputs for token in output.new_token_ids]
        want = reference_tokens(prompt, 3, VOCAB)
        assert found == [token for token in want if token in found]
        assert not engine._live


def test_the_signal_waits_for_the_end_of_the_context():
    done = []

    def work():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_signal_waits():
    """Each handler runs, whatever that of another one raises."""
    done = []

    def work():
        with Uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, Expired)
    assert done == [1]
    assert signal.getsignal(signal.SIGALRM) is expire


def test_an_error_of_the_context_is_not_lost():
    def fail():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert isinstance(raised.value.__context__, ValueError)


def test_other_threads_and_handlers_are_left_alone():
    seen = []
    before = signal.getsignal(signal.SIGINT)

    def look():
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[1] is signal.SIG_IGN
