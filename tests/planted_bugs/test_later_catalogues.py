"""The later catalogues fit the package as it is; how faults were proven is on record."""

import json
from pathlib import Path

import pytest

from tests.planted_bugs.sampled import WHOLE
from tests.planted_bugs.second.fault import KINDS, ROOT, Fault
from tests.planted_bugs.second.models import MODELS
from tests.planted_bugs.second.prove import catalogue
from tests.planted_bugs.second.score import score

FOLDERS = [Path(__file__).with_name(name) for name in ("third", "fourth", "fifth")]
CATALOGUES = {folder.name: catalogue(folder) for folder in FOLDERS}
FAULTS = [fault for faults in CATALOGUES.values() for fault in faults]
SCORED: dict[str, tuple[str, ...]] = {
    "decode-scores-two-selections": ("verify", "bisect"),
    "values-from-the-rows-end": ("verify", "bisect"),
    "layers-of-a-kind-share-caches": ("bisect",),
    "deeper-drafts-one-too-far": ("bisect",),
    "accepted-behind-a-wrong-draft": ("bisect",),
    "frequencies-without-yarn": ("verify", "bisect"),
    "window-start-dropped": ("verify", "bisect"),
    "columns-as-they-lie": ("verify", "bisect"),
    "first-columns-quantised": ("verify", "bisect"),
}
"""Faults of the third, the fourth and the fifth catalogue that are scored here, and the commands
that see them: ``verify`` runs no requests."""
SAMPLE = ("decode-scores-two-selections", "window-start-dropped", "columns-as-they-lie")
"""One of each catalogue; the runtime's are planted in tests/verify as well, in less time."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_fits_its_file(fault: Fault) -> None:
    text = fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
    compile(text, fault.file, "exec")
    assert fault.kind in KINDS
    assert fault.model in MODELS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_fault_is_proven(folder: Path) -> None:
    proofs = json.loads((folder / "proofs.json").read_text(encoding="utf-8"))
    assert proofs.keys() == {fault.id for fault in CATALOGUES[folder.name]}
    for fault in CATALOGUES[folder.name]:
        outcome = proofs[fault.id]["outcome"]
        assert (outcome == "harmless") is fault.control, (fault.id, outcome)


def test_no_fault_is_of_the_second_catalogue() -> None:
    seen = {(fault.file, fault.new) for fault in catalogue()}
    assert not any((fault.file, fault.new) in seen for fault in FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED if WHOLE else SAMPLE)
def test_the_right_place_is_named(name: str, tmp_path: Path) -> None:
    (fault,) = (fault for fault in FAULTS if fault.id == name)
    (folder,) = (folder for folder in FOLDERS if fault in CATALOGUES[folder.name])
    found = score(fault, tmp_path, folder)
    for command in SCORED[name]:
        assert found[command]["named"], found
        assert found[command]["innocents"] == [], found
