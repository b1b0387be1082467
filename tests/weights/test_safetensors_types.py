"""Types that safetensors' headers may name; safetensors itself says which sizes go with which."""

import json

import pytest
from safetensors import SafetensorError, safe_open

from dsa_compile.errors import CheckpointError
from dsa_compile.weights.dtypes import SAFETENSORS_BITS, SAFETENSORS_DTYPES
from dsa_compile.weights.safetensors_file import SafetensorsFile

SIZES = (4, 6, 8, 16, 32, 64)


def opens(path, how):
    try:
        how(path)
    except (SafetensorError, CheckpointError):
        return False
    return True


@pytest.mark.parametrize("tag", SAFETENSORS_BITS)
def test_elements_have_the_sizes_that_safetensors_gives_them(tag, tmp_path):
    path = tmp_path / "model.safetensors"
    for bits in SIZES:
        header = json.dumps({"x": {"dtype": tag, "shape": [8], "data_offsets": [0, bits]}})
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(bits))
        theirs = opens(path, lambda path: safe_open(path, "pt"))
        assert opens(path, lambda path: SafetensorsFile.open(path, CheckpointError)) is theirs
        assert theirs is (SAFETENSORS_BITS[tag] == bits)
        if theirs and tag in SAFETENSORS_DTYPES:
            with safe_open(path, "pt") as file:
                assert file.get_tensor("x").dtype is SAFETENSORS_DTYPES[tag]


def test_every_type_of_safetensors_is_known(tmp_path):
    path = tmp_path / "model.safetensors"
    header = b'{"x":{"dtype":"none such","shape":[],"data_offsets":[0,0]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SafetensorError) as error:
        safe_open(path, "pt")
    _, _, listed = str(error.value).partition("expected one of ")
    assert {tag for tag in SAFETENSORS_BITS if f"`{tag}`" in listed} == set(SAFETENSORS_BITS)
    assert listed.count("`") == 2 * len(SAFETENSORS_BITS)
