"""Programs that a machine is too small to run are refused, not accused."""

from pathlib import Path
from typing import Any, NoReturn

import pytest

from dsa_compile.errors import UserError
from dsa_compile.verify.bisect import criteria
from dsa_compile.verify.bisect.bisect_artifact import bisect_artifact
from dsa_compile.verify.checks import pass_check
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

LENGTH = 27


def no_memory(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 30064771072 bytes. Error code 12 (Cannot allocate memory)"
    )


def test_verify_accuses_no_pass(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_check, "run_stage", no_memory)
    told = "in front of strip_noise cannot be run on this machine: it wanted 30064771072 bytes"
    with pytest.raises(UserError, match=told):
        verify(recompiled.replay, recompiled.store, recompiled.prompt(tokens=LENGTH))


def test_bisect_accuses_no_rewrite(
    recompiled: RecompiledArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteria.ReferenceCheck, "_judge", no_memory)
    prompt = recompiled.prompt(tokens=LENGTH)
    with pytest.raises(UserError, match="rewrites cannot be run on this machine: it wanted"):
        bisect_artifact(recompiled, prompt, None, None, None, tmp_path, lambda _: None)
