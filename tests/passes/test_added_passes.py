"""A pass added as CONTRIBUTING says: from another package, by hand, and inside the tree."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import UserError
from dsa_compile.facts.config import AddedPass, CompileConfig
from dsa_compile.ir.passes import Pass
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.passes.added import assemble, pipeline_of
from dsa_compile.passes.listing import listing
from dsa_compile.passes.manager import pass_names
from dsa_compile.passes.options import with_options
from dsa_compile.passes.pipeline import PIPELINE
from examples.small_models.models import tiny_config

ROOT = Path(__file__).parents[2]

PASS = '''\
"""A reshape of what lies in order is a view.

Before::                            After::

    y = reshape(x, sizes)               y = view(x, sizes)

Declines: results of fewer dimensions than ``least``.
"""

import torch

from dsa_compile.facts.formats import BF16, FP32, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa


class ViewReshapes(RegionPass):
    """``reshape`` becomes ``view``."""

    requires = ("absorb_mla",)
    formats = kept_in(activations=(FP32, BF16))

    def __init__(self, least: int = 2) -> None:
        """Leave results of fewer dimensions alone."""
        self.least = least

    def expects(self, program: Program, region: Region) -> int | None:
        """The heads of every layer."""
        return each_layer(program, region) if self.least == 2 else None

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        heads = Call(dsa.expand_output.default, ANY, ANY, name="heads")
        for m in edit.matches(Call(aten.reshape.default, heads, [-1, ANY])):
            if m.root.meta["val"].ndim < self.least:
                edit.decline(m, f"has {m.root.meta['val'].ndim} dimensions")
                continue
            edit.replace(m.root, edit.call(aten.view.default, *m.root.args, before=m.root))
'''
TEST = """\
import torch

from dsa_compile.passes.view_reshapes import ViewReshapes
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa
INPUTS = (value("o", "T", 2, 8), weight("self_attn.w_uv", 2, 4, 8))


@region("dense", *INPUTS)
def before(o, w_uv):
    return aten.reshape.default(dsa.expand_output.default(o, w_uv), [-1, 8])


@region("dense", *INPUTS)
def expected(o, w_uv):
    return aten.view.default(dsa.expand_output.default(o, w_uv), [-1, 8])


def test_views(check: PassCheck) -> None:
    check(ViewReshapes(), before, expected)


def test_declines_few_dimensions(check: PassCheck) -> None:
    assert ViewReshapes(3).expects(None, None) is None
"""
AFTER = "select_logit_rows"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small model."""
    path = tmp_path_factory.mktemp("model")
    tiny_config(2, first_k_dense_replace=1).save_pretrained(path)
    return path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``install(passes)``: a package ``thing 1.2`` with that list of passes, for one test."""

    def do(passes: str = f'[(ViewReshapes(), "{AFTER}")]') -> None:
        site = tmp_path / "site"
        info = site / "thing-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[dsa_compile.passes]\nthing = thing_passes\n")
        (site / "thing_passes.py").write_text(f"{PASS}\n\nPASSES = {passes}\n")
        monkeypatch.syspath_prepend(site)

    yield do
    sys.modules.pop("thing_passes", None)


def added(install: Callable[..., None]) -> Pass:
    """The pass of the package, by hand."""
    install("[]")
    from thing_passes import ViewReshapes  # type: ignore[import-not-found]

    made: Pass = ViewReshapes()
    return made


@pytest.mark.slow
def test_from_another_package(install, model_dir: Path, tmp_path: Path) -> None:
    install()
    result = compile_model(model_dir, tmp_path / "a", weights="none")
    config = Artifact.open(tmp_path / "a").manifest.compile
    record = AddedPass("view_reshapes", "thing_passes:ViewReshapes", AFTER, "thing 1.2")
    assert config.added_passes == (record,)
    ran = {r.name: r for r in result.program.records}
    names = list(ran)
    assert names[names.index(AFTER) + 1] == "view_reshapes"
    assert (ran["view_reshapes"].rewrites, ran["view_reshapes"].expected) == (2, 2)
    assert (tmp_path / "a" / "passes").glob("*_view_reshapes/changes.diff")
    assert [step.name for step in pipeline_of(config) if isinstance(step, Pass)] == [
        step.name for step in assemble(CompileConfig(), ())[1] if isinstance(step, Pass)
    ]
    assert any(line.startswith("view_reshapes (bitwise; recipe fp32") for line in listing())
    with pytest.raises(UserError, match="disable"):
        compile_model(model_dir, tmp_path / "b", weights="none", disable=("absorb_mla",))
    left = compile_model(model_dir, tmp_path / "b", weights="none", disable=("view_reshapes",))
    assert "view_reshapes" not in [r.name for r in left.program.records]


@pytest.mark.slow
def test_by_hand(install, model_dir: Path, tmp_path: Path) -> None:
    step = type(added(install))(least=3)
    result = compile_model(model_dir, tmp_path / "a", weights="none", passes=[(step, AFTER)])
    config = Artifact.open(tmp_path / "a").manifest.compile
    assert config.added_passes == (AddedPass("view_reshapes", "thing_passes:ViewReshapes", AFTER),)
    assert config.pass_options == ("view_reshapes.least=3",)
    record = next(r for r in result.program.records if r.name == "view_reshapes")
    assert (record.rewrites, record.expected) == (0, None)
    assert {miss.reason for miss in record.near_misses} == {"has 2 dimensions"}
    with pytest.raises(UserError, match=r"pass view_reshapes .*handed to compile"):
        pipeline_of(config)


@pytest.mark.slow
def test_options_are_recorded_and_checked(model_dir: Path, tmp_path: Path) -> None:
    options = ("overlap_streams.streams=3",)
    compile_model(
        model_dir,
        tmp_path / "a",
        weights="none",
        target="sm_90a",
        recipe="fp32",
        pass_options=options,
    )
    config = Artifact.open(tmp_path / "a").manifest.compile
    assert config.pass_options == options
    (step,) = (step for step in pipeline_of(config) if step.name == "overlap_streams")
    assert step.streams == 3
    assert replace(config, pass_options=()).digest() != config.digest()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("streams=3", "option 'streams=3' should be PASS.NAME=VALUE"),
        ("overlap_stream.streams=3", "unknown pass 'overlap_stream'; did you mean 'overlap_stre"),
        ("overlap_streams.stream=3", "unknown option 'stream'; did you mean 'streams'?"),
        ("overlap_streams.streams=x", "option overlap_streams.streams=x: should be a whole number"),
        ("overlap_streams.streams=0", "pass overlap_streams: streams=0 should be at least 1"),
        ("pack_swiglu.x=1", "unknown option 'x'; it has none"),
    ],
)
def test_an_option_that_does_not_fit(option: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        with_options(PIPELINE, [option])
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("passes", "says"),
    [
        ("3", "passes of thing 1.2 (thing_passes): should be a list of (pass, name of the pass"),
        ('[(ViewReshapes, "strip_noise")]', "should be a list of (pass, name"),
        ('[(ViewReshapes(), "strip_nois")]', "to run after; did you mean 'strip_noise'?"),
        ('[(ViewReshapes(), "strip_noise")] * 2', "there is a pass of that name already"),
        (
            '[(type("Old", (ViewReshapes,), {"recipes": ("fp8",)})(), "strip_noise")]',
            "pass old of thing 1.2 sets recipes; say the formats that it is for instead",
        ),
        ("kept_in(weight=FP32)", "a recipe has no weight"),
        ("1 / 0", "cannot be imported (division by zero); mend or uninstall it"),
    ],
)
def test_a_package_that_is_wrong(install, passes: str, says: str) -> None:
    install(passes)
    with pytest.raises(UserError) as error:
        assemble(CompileConfig(), ())
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pass_may_follow_a_level_and_others_that_follow_it(install) -> None:
    step = added(install)
    kind = type(step)
    other = type("Other", (kind,), {})()
    _, pipeline = assemble(CompileConfig(), [(step, "LOGICAL"), (other, "LOGICAL")])
    names = [each.name for each in pipeline]
    at = names.index("LOGICAL")
    assert names[at + 1 : at + 4] == ["view_reshapes", "other", "token_major"]
    assert pass_names() == tuple(n for n in names if n in pass_names())


@pytest.mark.slow
def test_inside_the_tree(tmp_path: Path) -> None:
    """One file, one line in the order and one test file; no other test breaks."""
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns(".*", "__pycache__", "*.safetensors", "build", "demo")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    (tree / "passes" / "view_reshapes.py").write_text(PASS)
    (tree / "tests" / "passes" / "test_view_reshapes.py").write_text(TEST)
    order = tree / "passes" / "order.py"
    line = '    "select_logit_rows",\n'
    text = order.read_text()
    assert line in text
    order.write_text(text.replace(line, f'{line}    "view_reshapes",\n'))
    tests = (
        "tests/passes/test_view_reshapes.py", "tests/passes/test_manager.py",
        "tests/passes/test_full_geometry.py", "tests/passes/test_pipeline_walk.py",
        "tests/inspect/test_command.py", "tests/cli/test_compile.py",
    )  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
