"""Refusal of programs that this machine is too small to run: they are not wrong."""

from dsa_compile.errors import UserError
from dsa_compile.runtime.failures.step_errors import is_out_of_memory, shortage


def refuse_without_memory(error: Exception, what: str) -> None:
    """Do nothing, unless memory is what was missing.

    Args:
        error: that running ``what`` raised.
        what: was run, for the message.

    Raises:
        UserError: no memory was left for it.
    """
    if is_out_of_memory(error):
        raise UserError(
            f"{what} cannot be run on this machine: it {shortage(error)}; nothing was found wrong, "
            "and a machine with more memory can run it"
        ) from error
