"""``dsa-eval`` of an installed package, which has no text of its own."""

from pathlib import Path

import pytest

from dsa_compile.errors import UserError
from dsa_compile.measure.eval import texts


def test_the_error_names_no_file_of_a_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(texts, "HELD_OUT", tmp_path / "heldout.txt")
    with pytest.raises(UserError, match=r"not in an installed package; name .* with --text") as got:
        texts.read_texts()
    assert str(tmp_path) not in str(got.value)
