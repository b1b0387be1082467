"""Types of arguments that several commands share."""

import argparse

import pytest

from dsa_compile.cli.common import number, numbers


def test_k_stands_for_1024():
    assert numbers("1,16,8K,2k") == (1, 16, 8192, 2048)
    assert number("8K") == number("8192") == 8192


@pytest.mark.parametrize("text", ["", "8M", "K", "1,2", "8K,"])
def test_what_is_no_number_is_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number such as"):
        number(text)
