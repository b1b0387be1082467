"""``dsa-serve`` and ``dsa-generate`` of a model that is not compiled yet."""

import os
from pathlib import Path

import pytest

from dsa_compile.cli import generate, serve
from tests.server.serving import serving
from tests.trained import trained_model


@pytest.mark.slow
def test_one_command_compiles_and_serves(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for compiles in (True, False):
        with serving(trained_model(), "--block-size", "32", env=env) as server:
            answer = server.post(
                "/v1/completions", prompt="import os", max_tokens=4, temperature=0
            ).json()
            assert answer["model"] == "checkpoint"
            assert answer["choices"][0]["text"].startswith("\nimport sys")
            assert any("running passes" in line for line in server.log) is compiles
            # the compiler's torch is not in the process that speaks HTTP
            maps = Path(f"/proc/{server.process.pid}/maps").read_text()
            assert "libtorch" not in maps


@pytest.mark.parametrize("command", [serve, generate])
def test_an_artifact_takes_no_compile_options(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    argv = [str(tmp_path), "--recipe", "fp8"]
    assert command.main(argv + (["--prompt", "a"] if command is generate else [])) == 2
    assert "is compiled already, without --recipe; give a model" in capsys.readouterr().err


def test_what_the_compiler_refuses_ends_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(tmp_path)])
    err = capfd.readouterr().err
    assert err.count("error") == 1
    assert "model_type='llama' is not supported" in err
