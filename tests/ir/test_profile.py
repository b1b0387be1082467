"""Files of measured times: written, read, refused, and used in place of estimates."""

import json

import pytest
import torch
from torch import fx

from dsa_compile.errors import UserError
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.region import Role
from dsa_compile.ir.stream_profile import Profile, call_key
from dsa_compile.ir.tensor_info import describe
from dsa_compile.passes.stream_costs import DEVICES, CostModel

dsa = torch.ops.dsa
PROFILE = Profile("NVIDIA H200", "sm_90a", 4, 2048, {"dsa.linear.default(f32[T, 8])": 3.5})


def linear(rows=4096, columns=8192):
    world = FakeWorld()
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta |= {"role": Role.VALUE, "val": world.tensor(("T", columns), torch.float32)}
    weight.meta |= {"role": Role.WEIGHT, "val": world.tensor((rows, columns), torch.float32)}
    node = graph.create_node("call_function", dsa.linear.default, (x, weight))
    node.meta["val"] = world.tensor(("T", rows), torch.float32)
    return node


def test_what_was_saved_is_loaded(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json", "sm_90a")
    assert loaded == PROFILE
    assert loaded.digest() == PROFILE.digest()
    assert Profile(**{**vars(PROFILE), "calls": {}}).digest() != PROFILE.digest()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda d: d.update(format=2), "not a profile of format 1"),
        (lambda d: d.pop("tokens"), "its fields are not those of a profile"),
        (lambda d: d.update(tokens=0), "its fields are not those of a profile"),
        (lambda d: d["calls"].update(x=-1.0), "its fields are not those of a profile"),
        (lambda d: d["calls"].update(x="1"), "its fields are not those of a profile"),
        (lambda d: d.update(target="sm_100a"), "measured on sm_100a, the target is sm_90a"),
    ],
)
def test_other_files_are_refused(tmp_path, edit, says):
    path = tmp_path / "p.json"
    PROFILE.save(path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=says):
        Profile.load(path, "sm_90a")


def test_a_file_that_is_not_there_or_not_json(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Profile.load(tmp_path / "none.json", "sm_90a")
    (tmp_path / "text").write_text("µs")
    with pytest.raises(UserError, match="not JSON"):
        Profile.load(tmp_path / "text", "sm_90a")


def test_a_call_has_one_key_in_a_program_and_in_an_artifact():
    node = linear()
    key = call_key(node)
    assert key == "dsa.linear.default(f32[T, 8192], f32[4096, 8192])"
    for source in node.all_input_nodes:
        source.meta["val"] = describe(source.meta["val"])
    assert call_key(node) == key


def test_estimates_follow_the_bytes():
    """128 MiB of weights at 4.3 TB/s, and a launch."""
    device = DEVICES["sm_90a"]
    cost = CostModel(device, 64).of(linear())
    assert cost.us == pytest.approx(4096 * 8192 * 4 / 4.3e6 + device.launch_us, rel=1e-3)
    assert cost.fills
    small = CostModel(device, 64).of(linear(rows=64))
    assert small.us < 3.0
    assert not small.fills


def test_measured_times_replace_estimates():
    node = linear()
    model = CostModel(DEVICES["sm_90a"], 64, measured={call_key(node): 70.0})
    assert model.of(node).us == 70.0
    assert model.of(node).fills
    assert not CostModel(DEVICES["sm_90a"], 64, measured={call_key(node): 700.0}).of(node).fills
