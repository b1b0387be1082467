"""Types of arguments that several commands share."""

import argparse
import subprocess
import sys

import pytest

from dsa_compile.cli.common import SubParser, number, numbers
from dsa_compile.errors import UserError


def test_k_stands_for_1024():
    assert numbers("1,16,8K,2k") == (1, 16, 8192, 2048)
    assert number("8K") == number("8192") == 8192


@pytest.mark.parametrize("text", ["", "8M", "K", "1,2", "8K,"])
def test_what_is_no_number_is_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number such as"):
        number(text)


def test_a_reader_that_left_is_no_failure_of_a_table() -> None:
    """As ``| head`` does, of what rich prints."""
    code = (
        "import sys, time\n"
        "from dsa_compile.cli.common import guarded\n"
        "from dsa_compile.cli.tables import console\n"
        "sys.stdin.readline()\n"
        "sys.exit(guarded('x', lambda: [console().print('y' * 200) for _ in range(999)] and 0))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()
    command.communicate(b"\n")
    assert command.returncode == 0


def test_a_misspelt_flag_is_named_where_another_is_missing() -> None:
    parser = SubParser(prog="x")
    parser.add_mutually_exclusive_group(required=True).add_argument("--prompt")
    parser.add_argument("--prom")
    with pytest.raises(UserError, match=r"did you mean --prompt\?$"):
        parser.parse_args(["--promt", "a"])
