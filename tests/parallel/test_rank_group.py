"""Ranks as processes: the tokens of one, whatever the scheduler does, and an end where one dies."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.ir.plan import LONG_PROMPT, PROMPT
from dsa_compile.runtime import DeviceLost, Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.ranks import group
from dsa_compile.runtime.ranks.gloo import GlooCommunicator, open_store
from dsa_compile.runtime.ranks.peers import StorePeers
from tests.quick_cases import quick_first

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPTS = [
    "import os",
    list(range(3, 150)),  # beyond index_topk, in chunks
    [*range(3, 150), 7, 8, 9],  # shares a prefix
    "def main():",
    *([number] * 14 for number in range(20, 26)),  # of one block, and of three in the end
]
Artifact = Callable[[str], Path]


def tokens(engine: Engine) -> list[list[int]]:
    """Tokens of all prompts, twice: the second time they find their prefixes."""
    found = []
    for _ in range(2):
        found += [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    return found


def gone(pid: int) -> bool:
    """Whether a process of ours is neither running nor a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def wanted(artifact: Artifact) -> list[list[int]]:
    """The tokens of one rank."""
    with Engine.load(artifact("one"), num_gpu_blocks_override=64) as engine:
        return tokens(engine)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "ep2"])
@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_give_the_tokens_of_one(artifact, wanted, layout, overlap) -> None:
    """With few blocks and short steps: through preemption, chunks of prompts, and prefixes."""
    options = {
        "num_gpu_blocks_override": 13,
        "max_num_batched_tokens": 48,
        "async_scheduling": overlap,
    }
    with Engine.load(artifact(layout), **options) as engine:
        assert tokens(engine) == wanted
        assert engine.stats().preemptions > 0
        assert engine.stats().owned_blocks == 0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Variants of the first rank's steps."""
    found: Counter[str] = Counter()
    choose = ModelRunner.variant_of

    def noted(runner: ModelRunner, batch: Batch) -> str:
        variant = choose(runner, batch)
        found[variant] += 1
        return variant

    monkeypatch.setattr(ModelRunner, "variant_of", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", quick_first(["dp2ep2", "tp2", "ep2", "tp2dp2"]))
def test_ranks_run_steps_of_whole_prompts(artifact, wanted, ran, layout) -> None:
    """Two lanes may run different variants in one step."""
    within = [list(range(200 + 60 * n, 260 + 60 * n)) for n in range(6)]  # index_topk, which is 64
    with Engine.load(artifact(layout), num_gpu_blocks_override=96) as engine:
        assert tokens(engine) == wanted
        ours = [output.token_ids for output in engine.generate(within, GREEDY)]
    assert ran[PROMPT] > 0
    assert ran[LONG_PROMPT] > 0
    with Engine.load(
        artifact("one"), num_gpu_blocks_override=96, max_num_batched_tokens=48
    ) as engine:
        assert [output.token_ids for output in engine.generate(within, GREEDY)] == ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overlap"), [("dp2", False), ("dp2ep2", True), ("tp2dp2", False)]
)
def test_lanes_give_the_tokens_of_one(artifact, wanted, layout, overlap) -> None:
    """Likewise, with one request alone at first: the other lane runs steps of padding."""
    options = {
        "num_gpu_blocks_override": 13,
        "max_num_batched_tokens": 48,
        "async_scheduling": overlap,
    }
    with Engine.load(artifact(layout), **options) as engine:
        (output,) = engine.generate([PROMPTS[0]], GREEDY)
        assert output.token_ids == wanted[0]
        assert tokens(engine) == wanted
        stats = engine.stats()
        assert all(lane.preemptions > 0 for lane in stats.lanes)
        assert stats.prefix_hit_tokens > 0
        assert stats.owned_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2-mtp", {"num_speculative_tokens": 3, "async_scheduling": True}),
        ("tp2", {"draft": "ngram"}),
        ("dp2-mtp", {"num_speculative_tokens": 1}),
        ("dp2ep2-mtp", {"num_speculative_tokens": 4, "async_scheduling": True}),
        ("tp2dp2-mtp", {"num_speculative_tokens": 2, "async_scheduling": True}),
        ("dp2ep2", {"draft": "ngram"}),
    ],
)
def test_ranks_that_draft_give_the_tokens_of_one(artifact, wanted, layout, options) -> None:
    """The first rank's host chooses the tokens of some requests, every rank those of others. Lanes
    draft beside one that has nothing to do at first."""
    params = [GREEDY] * len(PROMPTS)
    params[2] = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
    params[1] = SamplingParams(max_tokens=24, temperature=0.0, prompt_logprobs=0)
    limits = {"num_gpu_blocks_override": 13, "max_num_seqs": 9, "max_num_batched_tokens": 48}
    with Engine.load(artifact(layout), **limits, **options) as engine:
        (output,) = engine.generate([PROMPTS[0]], GREEDY)
        assert output.token_ids == wanted[0]
        for chosen in (params, [GREEDY] * len(PROMPTS)):
            found = [output.token_ids for output in engine.generate(PROMPTS, chosen)]
            assert found == wanted[: len(PROMPTS)]
        stats = engine.stats()
        assert stats.accepted[0] > 0
        assert stats.preemptions > 0
        assert stats.owned_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2ep2", "dp2ep2-mtp"])
def test_a_lane_that_dies_ends_the_group_by_name(artifact, layout) -> None:
    with Engine.load(artifact(layout), num_gpu_blocks_override=64) as engine:
        (pid,) = engine._runner.pids
        engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
        engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
            engine.step()
        assert gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2ep2", "dp2ep2-mtp"])
def test_an_aborted_request_leaves_the_others_alone(artifact, wanted, layout) -> None:
    limits = {"num_gpu_blocks_override": 64, "max_num_seqs": 9, "max_num_batched_tokens": 48}
    with Engine.load(artifact(layout), **limits) as engine:
        pids = engine._runner.pids
        for number, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(str(number), prompt, GREEDY)
        outputs = {}
        for step in range(100):
            if step == 4:
                engine.abort("1")
            for output in engine.step():
                outputs[output.request_id] = output
            if not engine.has_unfinished():
                break
        assert [outputs[name].token_ids for name in ("0", "2")] == [wanted[0], wanted[2]]
    assert all(map(gone, pids))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks of this process that have freed what they share."""
    ranks: list[int] = []
    monkeypatch.setattr(GlooCommunicator, "close", lambda self: ranks.append(self._rank))
    return ranks


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_group_by_name(artifact, closed) -> None:
    with Engine.load(artifact("tp2"), num_gpu_blocks_override=64) as engine:
        (pid,) = engine._runner.pids
        engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
        engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceLost) as error:
            engine.step()
        assert f"rank 1 (process {pid}) was killed by SIGKILL" in str(error.value)
        assert "\n" not in str(error.value)
        assert gone(pid)  # waited for: no zombie
        del error  # and the frames that it came from
        with pytest.raises(DeviceLost, match="rank 1"):
            engine.step()
        group = weakref.ref(engine._runner)
    assert group() is None  # close() frees it, with its thread
    assert not [thread for thread in threading.enumerate() if thread.name == "ranks"]
    assert closed == []  # on a GPU a kernel may wait for the lost rank, in the memory they share


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_group_by_name(artifact) -> None:
    with Engine.load(artifact("tp2"), num_gpu_blocks_override=64, rank_timeout=15) as engine:
        (pid,) = engine._runner.pids
        os.kill(pid, signal.SIGSTOP)
        engine.add_request("a", [5, 6, 7], GREEDY)
        with pytest.raises(DeviceLost, match=rf"rank 1 \(process {pid}\) did not answer"):
            engine.step()
        assert gone(pid)


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_are_those_of_one_rank(artifact, wanted) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    found = []
    for layout in ("one", "tp2", "dp2ep2"):
        with Engine.load(
            artifact(layout), num_gpu_blocks_override=64, max_num_batched_tokens=48
        ) as engine:
            (output,) = engine.generate([PROMPTS[1]], params)
            found.append([entry.logprob for entry in output.prompt_logprobs[1:]])
            assert output.token_ids == wanted[1][:3]
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    assert found[0] == pytest.approx(found[2], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "leave it out, or compile without --dp"),
        ({"mixed_graph_tokens": (512,)}, "only decode steps of theirs are captured"),
    ],
)
def test_what_lanes_cannot_do(options, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        group.load_ranks("artifact", "cpu", EngineOptions(**options), Layout(dp=2, ep=2))
    assert "\n" not in str(error.value)


def test_as_many_gpus_as_ranks(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="4 ranks need 4 GPUs, and torch sees 1 here"):
        group.load_ranks("artifact", "sm_90a", EngineOptions(), Layout(tp=2, dp=2))


def test_a_rank_that_does_not_come_is_named() -> None:
    store = open_store(2, 10)
    with pytest.raises(UserError, match=r"rank 1 did not come within 0\.1 s .*: processes"):
        StorePeers(store, 0, 2, timeout=0.1).least("processes", 0)


def test_the_table_of_addresses_is_for_this_machine() -> None:
    store = open_store(2, 10)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    lines += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A"]
    addresses = {a.split(":")[0] for a in listening if int(a.split(":")[1], 16) == store.port}
    assert addresses == {"0100007F"}  # 127.0.0.1


def test_ranks_agree_on_the_least() -> None:
    store = open_store(2, 10)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(StorePeers(store, 1, 2).least, "blocks", 7)
        assert StorePeers(store, 0, 2).least("blocks", 9) == 7
        assert other.result() == 7


def test_a_rank_that_cannot_load_says_why(artifact, monkeypatch) -> None:
    real = group.start_process
    started = []

    def start(rank: int):
        started.append(real(rank))
        os.kill(started[-1].process.pid, signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(group, "start_process", start)
    with pytest.raises(UserError, match=r"rank 1 .* was killed by SIGTERM"):
        Engine.load(artifact("tp2"), num_gpu_blocks_override=64)
    assert gone(started[0].process.pid)


FORKING = """
import os, sys
from dsa_compile.runtime import DeviceLost, Engine, SamplingParams

engine = Engine.load(sys.argv[1], num_gpu_blocks_override=64)
params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
(before,) = engine.generate([[5, 6, 7]], params)
child = os.fork()
if not child:
    try:
        engine.generate([[5, 6, 7]], params)
    except DeviceLost as error:
        print("child:", error, flush=True)
    if sys.argv[2] == "close":
        engine.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
(after,) = engine.generate([[5, 6, 7]], params)
print("status", status, "same", after.token_ids == before.token_ids, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_fork_leaves_the_ranks_alone(artifact, end: str) -> None:
    command = [sys.executable, "-c", FORKING, str(artifact("tp2")), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "child: this process was forked from the one that loaded" in done.stdout, done.stderr
    assert "status 0 same True" in done.stdout


@pytest.mark.slow
def test_ranks_end_with_the_engine_that_is_dropped(artifact, closed) -> None:
    engine = Engine.load(artifact("tp2"), num_gpu_blocks_override=64)
    (pid,) = engine._runner.pids
    engine.close()
    assert closed == [0]
    for _ in range(100):
        if gone(pid):
            break
        time.sleep(0.1)
    assert gone(pid)
