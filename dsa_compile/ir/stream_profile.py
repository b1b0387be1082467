"""Times of single calls, measured on the target by ``dsa-bench step --profile FILE``.

A file is a JSON object::

    {"format": 1, "device": "NVIDIA H200", "target": "sm_90a", "tokens": 1, "context": 8192,
     "calls": {"dsa.linear_fp8.default(f8e4m3[T, 7168], f32[T, 56], …)": 6.1, …}}

``tokens`` is the number of sequences of the decode step that was measured, ``context`` the rows
that each saw; ``calls`` has microseconds by :func:`call_key`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import UserError
from dsa_compile.ir.argument_json import encode
from dsa_compile.ir.graph import typed_call
from dsa_compile.ir.tensor_info import describe

FORMAT = 1


@dataclass(frozen=True)
class Profile:
    """Measured times of calls; see the module's docstring."""

    device: str
    target: str
    tokens: int
    context: int
    calls: Mapping[str, float]

    def save(self, path: Path) -> None:
        """Write the file."""
        data = {
            "format": FORMAT,
            "device": self.device,
            "target": self.target,
            "tokens": self.tokens,
            "context": self.context,
            "calls": dict(sorted(self.calls.items())),
        }
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, target: str) -> "Profile":
        """Read a file made for ``target``.

        Raises:
            UserError: it cannot be read, is no profile, or was measured on another target.
        """
        try:
            data = json.loads(read_regular(path).decode())
        except OSError as error:
            raise UserError(f"--profile {path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError):
            raise UserError(f"--profile {path}: not JSON; {_REMEDY}") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise UserError(f"--profile {path}: not a profile of format {FORMAT}; {_REMEDY}")
        if not _is_sound(data):
            raise UserError(f"--profile {path}: its fields are not those of a profile; {_REMEDY}")
        made = cls(**data)
        if made.target != target:
            raise UserError(
                f"--profile {path}: measured on {made.target}, the target is {target}; "
                "measure there, or leave --profile out"
            )
        return made

    def digest(self) -> str:
        """Hex SHA-256 over the content."""
        content = [self.device, self.target, self.tokens, self.context, sorted(self.calls.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


_LONGEST_US = 1e12  # as whole numbers may be larger than any float
_REMEDY = "make one with dsa-bench step --profile"


def _is_sound(data: Mapping[str, Any]) -> bool:
    calls = data.get("calls")
    return (
        data.keys() == {"device", "target", "tokens", "context", "calls"}
        and isinstance(data["device"], str)
        and isinstance(data["target"], str)
        and all(type(data[name]) is int and data[name] > 0 for name in ("tokens", "context"))
        and isinstance(calls, dict)
        and all(type(us) in (int, float) and 0 <= us < _LONGEST_US for us in calls.values())
    )


def call_key(node: fx.Node) -> str:
    """A call by its op and the types of its tensors, the same in a program and in an artifact."""
    types = {n.name: str(describe(n.meta.get("val"))) for n in node.all_input_nodes}
    return typed_call(str(node.target), map(encode, (*node.args, *node.kwargs.values())), types)
