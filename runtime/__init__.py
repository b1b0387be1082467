"""Serving a compiled model: scheduler, caches, sampler and the engine that joins them.

Nothing here imports the compiler; an artifact and these modules are all a server needs. The names
below are imported when they are first used: the modules of ``runtime.requests`` work without torch,
for a process that handles text alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.runtime.async_engine import AsyncEngine
    from dsa_compile.runtime.engine import Engine
    from dsa_compile.runtime.engine_options import EngineOptions
    from dsa_compile.runtime.failures.step_errors import DeviceLost, OutOfMemory, StepError
    from dsa_compile.runtime.requests.chat_prompt import ChatOutput, ChatPrompt
    from dsa_compile.runtime.requests.grammar import Grammar
    from dsa_compile.runtime.requests.logprobs import TokenLogprobs
    from dsa_compile.runtime.requests.outputs import RequestOutput
    from dsa_compile.runtime.requests.sampling_params import SamplingParams

__all__ = [
    "AsyncEngine",
    "ChatOutput",
    "ChatPrompt",
    "DeviceLost",
    "Engine",
    "EngineOptions",
    "Grammar",
    "OutOfMemory",
    "RequestOutput",
    "SamplingParams",
    "StepError",
    "TokenLogprobs",
]

_MODULES = {
    "AsyncEngine": "async_engine",
    "ChatOutput": "requests.chat_prompt",
    "ChatPrompt": "requests.chat_prompt",
    "DeviceLost": "failures.step_errors",
    "Engine": "engine",
    "EngineOptions": "engine_options",
    "Grammar": "requests.grammar",
    "OutOfMemory": "failures.step_errors",
    "RequestOutput": "requests.outputs",
    "SamplingParams": "requests.sampling_params",
    "StepError": "failures.step_errors",
    "TokenLogprobs": "requests.logprobs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
