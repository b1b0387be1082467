"""Ranks that torchrun starts: which process is which, how they meet, and what goes wrong then."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.ranks import torchrun
from dsa_compile.runtime.ranks.torchrun_environment import StartedRank, started_rank

HOST = "127.0.0.1"
STARTED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": "1"}
TP2 = Layout(tp=2)
FIRST, SECOND = StartedRank(0, 2, HOST, 1), StartedRank(1, 2, HOST, 1)


def test_the_environment_says_which_process_this_is() -> None:
    assert started_rank(STARTED) == SECOND
    assert started_rank({**STARTED, "LOCAL_WORLD_SIZE": "2"}) == SECOND


@pytest.mark.parametrize("changed", [{"WORLD_SIZE": "1"}, {"MASTER_PORT": None}, {"RANK": None}])
def test_a_process_may_be_the_only_one(changed) -> None:
    both = {**STARTED, **changed}
    assert started_rank({name: value for name, value in both.items() if value}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "1"}, "ranks share one machine; use torchrun --nnodes 1"),
        ({"RANK": "one"}, "RANK='one' should be a number"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2: ranks count from 0"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1' should be a number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 should be at most 65535"),
    ],
)
def test_what_cannot_be_started(changed, message: str) -> None:
    with pytest.raises(UserError, match=message):
        started_rank({**STARTED, **changed})


def test_as_many_processes_as_ranks() -> None:
    message = "for 2 ranks .*torchrun has started 4 processes; use --nproc-per-node 2"
    with pytest.raises(UserError, match=message) as error:
        torchrun.join_ranks(StartedRank(0, 4, HOST, 1), HashStore(), TP2, "artifact")
    assert "\n" not in str(error.value)


def test_a_rank_that_does_not_connect_is_named() -> None:
    with pytest.raises(UserError, match=r"rank 1 did not come within 0\.1 s: every process of"):
        torchrun.join_ranks(FIRST, HashStore(), TP2, "artifact", timeout=0.1)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    store = HashStore()
    monkeypatch.setattr(torchrun, "open_shared_store", lambda started, timeout: store)
    return store


def test_a_run_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end with it, so that there is nobody to wait for."""
    monkeypatch.setattr(torchrun, "_JOINED", ["first"])
    with pytest.raises(UserError, match="second: a run of torchrun has one engine, and this pro"):
        torchrun.join_ranks(FIRST, HashStore(), TP2, "second")


def test_a_first_rank_that_does_not_come_is_named(shared: HashStore) -> None:
    with pytest.raises(
        UserError, match=r"rank 0 did not come within 0\.1 s, for which rank 1 wait"
    ):
        torchrun.follow_first_rank(SECOND, timeout=0.1)


def test_a_first_rank_that_is_gone_is_named(shared: HashStore) -> None:
    shared.set(torchrun._ADDRESS, "/nowhere/ranks")
    with pytest.raises(UserError, match="rank 1 cannot reach rank 0: No such file or directory"):
        torchrun.follow_first_rank(SECOND, timeout=5)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one; the processes are started by hand, so that the first one opens it."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


def test_restarted_ranks_see_nothing_of_those_before(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """torchrun keeps its store, with the address of a first rank that has ended."""
    first, second = (StartedRank(rank, 2, HOST, port) for rank in (0, 1))
    kept = torchrun.open_shared_store(first, 5)
    kept.set(torchrun._ADDRESS, "/nowhere/ranks")
    assert torchrun.open_shared_store(second, 5).check([torchrun._ADDRESS])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not torchrun.open_shared_store(second, 5).check([torchrun._ADDRESS])


def test_a_process_that_was_not_started_is_named(port: int) -> None:
    """By the first rank, which opens the store alone, and by those that miss the first."""
    first, third = (StartedRank(rank, 3, HOST, port) for rank in (0, 2))
    with pytest.raises(UserError, match=r"rank 0 did not come within 0\.1 s, for which rank 2 wai"):
        torchrun.follow_first_rank(third, timeout=0.1)
    store = torchrun.open_shared_store(first, 5)
    with pytest.raises(UserError, match=r"rank 1 and rank 2 did not come within 0\.1 s: every"):
        torchrun.join_ranks(first, store, Layout(tp=3), "artifact", timeout=0.1)


def test_an_address_that_is_none_is_named(port: int) -> None:
    with pytest.raises(UserError, match=f"ranks cannot meet at no.invalid:{port}: "):
        torchrun.open_shared_store(StartedRank(1, 2, "no.invalid", port), 5)


def test_a_port_in_use_is_named(port: int) -> None:
    with socket.create_server((HOST, port)):
        message = f"cannot meet at {HOST}:{port}: the port is in use; .*--master-port"
        with pytest.raises(UserError, match=message):
            torchrun.open_shared_store(StartedRank(0, 2, HOST, port), 5)


def test_a_process_is_watched_and_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        process = torchrun.StartedProcess(other.pid)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(60) == 1
        assert process.poll() == 1
        assert other.wait() < 0
        process.kill()  # once more: it is gone


def test_ranks_end_with_the_first_one(shared: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is told to end does so with status 0, one whose first rank is gone with 1."""
    statuses = []
    monkeypatch.setattr(torchrun.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        torchrun, "serve_rank", lambda connection, store: statuses.append(connection.recv()) or 0
    )
    follower = threading.Thread(target=torchrun.follow_first_rank, args=(SECOND, 60))
    follower.start()
    (process,) = torchrun.join_ranks(FIRST, shared, TP2, "artifact", timeout=60)
    assert (process.rank, process.process.pid) == (1, os.getpid())
    process.connection.send("a step")
    follower.join()
    assert statuses == ["a step"]


@pytest.mark.slow
def test_a_sharded_artifact_runs_under_torchrun(artifact, tmp_path: Path) -> None:
    """With the tokens of ranks that the engine starts itself; all processes end with status 0."""
    prompt = ["--prompt-ids", "5 6 7", "--max-tokens", "6", "--temperature", "0"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "dsa_compile.cli.generate", str(artifact("tp2")), *prompt,
        "--num-gpu-blocks-override", "8", "--json",
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **threads}
    )
    assert done.returncode == 0, done.stderr
    with Engine.load(artifact("tp2"), num_gpu_blocks_override=8) as engine:
        params = SamplingParams(max_tokens=6, temperature=0.0)
        (output,) = engine.generate([[5, 6, 7]], params)
    assert str(output.token_ids)[1:-1] in " ".join(done.stdout.split())
