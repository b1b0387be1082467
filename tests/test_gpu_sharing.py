"""GPUs divided between processes of a test run."""

import subprocess
import sys

from tests.gpu_sharing import own_first, shared, visible


def test_each_process_has_another_gpu_first_and_all_of_them() -> None:
    found = [own_first({}, f"gw{n}", 4, 8)["CUDA_VISIBLE_DEVICES"] for n in (0, 1, 3, 5)]
    assert found == ["0,1,2,3", "1,2,3,0", "3,0,1,2", "1,2,3,0"]


def test_half_as_many_processes_have_pairs() -> None:
    found = [own_first({}, f"gw{n}", 4, 2)["CUDA_VISIBLE_DEVICES"] for n in (0, 1)]
    assert found == ["0,1,2,3", "2,3,0,1"]


def test_gpus_that_are_hidden_stay_so() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "6,GPU-a1"}
    assert own_first(environment, "gw1", 2, 2) == {"CUDA_VISIBLE_DEVICES": "GPU-a1,6"}
    assert visible(environment, 2) == ["6", "GPU-a1"]
    assert visible({}, 2) == ["0", "1"]


def test_one_gpu_is_shared_as_it_is() -> None:
    assert own_first({"CUDA_VISIBLE_DEVICES": "2"}, "gw3", 1, 4) == {}
    assert own_first({}, "gw3", 0, 4) == {}


TRY = """
import fcntl, sys
for path in sys.argv[1:]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            print("free")
        except BlockingIOError:
            print("taken")
"""


def test_who_is_alone_takes_all_its_gpus_and_no_other(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def tried(*gpus: str, alone: bool) -> list[str]:
        with shared(["0", "1", "2"], alone=False):  # makes the files
            pass
        with shared(gpus, alone=alone):
            files = sorted(str(path) for path in tmp_path.iterdir())
            command = [sys.executable, "-c", TRY, *files]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return done.stdout.split()

    assert tried("2", "0", alone=True) == ["taken", "free", "taken"]
    assert tried("2", "0", alone=False) == ["free"] * 3
