"""Processes that torchrun has started: which of them this one is, by its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsa_compile.errors import UserError

_RANK, _WORLD, _LOCAL = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
_HOST, _PORT = "MASTER_ADDR", "MASTER_PORT"
_LAST_PORT = 65535


@dataclass(frozen=True)
class StartedRank:
    """One of several processes that were started together.

    Args:
        rank: its number, from 0.
        world: how many there are.
        host: address of the machine on which their store is, by name or number.
        port: of the store.
    """

    rank: int
    world: int
    host: str
    port: int


def started_rank(environment: Mapping[str, str] = os.environ) -> StartedRank | None:
    """Rank of this process among those of ``torchrun``; None where it is the only one.

    Args:
        environment: as ``torchrun`` sets it for the processes that it starts.

    Raises:
        UserError: the processes are on several machines, or a variable is no number or too large.
    """
    if any(name not in environment for name in (_RANK, _WORLD, _HOST, _PORT)):
        return None
    rank, world = (_number(environment, name) for name in (_RANK, _WORLD))
    if world <= 1:
        return None
    port = _number(environment, _PORT)
    if rank >= world:
        raise UserError(f"{_RANK}={rank} of {_WORLD}={world}: ranks count from 0")
    if port > _LAST_PORT:
        raise UserError(f"{_PORT}={port} should be at most {_LAST_PORT}")
    local = _number(environment, _LOCAL) if _LOCAL in environment else world
    if local != world:
        raise UserError(
            f"{_WORLD}={world}, of which {_LOCAL}={local} on this machine: ranks share one "
            "machine; use torchrun --nnodes 1"
        )
    return StartedRank(rank, world, environment[_HOST], port)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} should be a number, as torchrun sets it")
    return int(text)
