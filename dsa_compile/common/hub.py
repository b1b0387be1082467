"""Models of the Hugging Face Hub: from the local cache, or downloaded into it.

The cache, the endpoint and the token are those of ``huggingface_hub``: HF_HOME, HF_ENDPOINT,
HF_TOKEN and HF_HUB_OFFLINE count here as they do for it.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsa_compile.errors import UserError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Everything but weights: configuration, tokenizer, chat template, index of the weights.
_SMALL = ("*.json", "*.jinja")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub in the local cache.

    Attributes:
        name: ``owner/name``.
        revision: branch, tag or commit; None for the default branch.
        path: the snapshot with the small files; its name is the commit.
    """

    name: str
    revision: str | None
    path: Path

    @property
    def commit(self) -> str:
        """The commit of the snapshot, in hexadecimal digits."""
        return self.path.name

    def fetch_weights(self, layers: tuple[int, int] | None) -> None:
        """Bring the weights into the cache: only the files that hold what these layers need.

        Args:
            layers: first and last decoder layer; None for all.

        Raises:
            UserError: they cannot be had; says what to do.
        """
        names = _weight_files(self.path, layers)
        _snapshot(self.name, self.commit, names)
        missing = [name for name in names if not (self.path / name).exists()]
        if missing:
            raise UserError(
                f"{self.name}: its index names {len(missing)} files of weights that are not there, "
                f"such as {missing[0]}; give another --revision, or --weights none"
            )


def is_hub_id(model: str) -> bool:
    """Whether a model's name can only be one of the Hub: ``owner/name``, and no local path.

    Where ``owner`` is a directory here, a path in it was meant.
    """
    return (
        bool(_ID.fullmatch(model)) and not Path(model).exists() and not Path(model).parent.is_dir()
    )


def find(name: str, revision: str | None = None) -> HubModel:
    """Bring all of a model but its weights into the cache.

    Raises:
        UserError: no such model or revision, no access, no network, or not in the cache while
            HF_HUB_OFFLINE is set; says what to do.
    """
    return HubModel(name, revision, _snapshot(name, revision, _SMALL))


def _weight_files(path: Path, layers: tuple[int, int] | None) -> list[str]:
    index = path / _INDEX
    if not index.exists():
        return [_SINGLE]
    try:
        homes = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        return sorted({str(home) for key, home in homes if _needed(key, layers)})
    except (OSError, ValueError, LookupError, AttributeError, RecursionError):
        raise UserError(f"{index}: not a valid index; download the model again") from None


def _needed(key: str, layers: tuple[int, int] | None) -> bool:
    found = _LAYER.match(key)
    return layers is None or found is None or layers[0] <= int(found[1]) <= layers[1]


def _snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _explained(name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the Hub into one line that says what to do."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    answers: tuple[tuple[type[Exception], Callable[[], str]], ...] = (
        (
            errors.GatedRepoError,
            lambda: (
                f"access must be granted first: accept its terms on {where}/{name}, then log "
                "in with: hf auth login"
            ),
        ),
        (
            errors.RepositoryNotFoundError,
            lambda: (
                f"there is no such directory here and no such model on {where} that you may "
                "see; mend the name, or log in with: hf auth login"
            ),
        ),
        (
            errors.RevisionNotFoundError,
            lambda: f"has no revision {revision!r}; give a branch, a tag or a commit",
        ),
        (errors.LocalEntryNotFoundError, lambda: _not_here(constants.HF_HUB_OFFLINE, where)),
        (errors.OfflineModeIsEnabled, lambda: _not_here(True, where)),
        (errors.HfHubHTTPError, lambda: f"{where} refuses it; try again later"),
        (ValueError, lambda: "a name that the Hub does not allow, of the model or of a file in it"),
        (
            OSError,
            lambda: f"cannot be kept in {constants.HF_HUB_CACHE}; set HF_HOME to another place",
        ),
    )
    try:
        yield
    except tuple(kind for kind, _ in answers) as error:
        told = next(tell() for kind, tell in answers if isinstance(error, kind))
        detail = "" if isinstance(error, errors.LocalEntryNotFoundError) else _first_line(error)
        raise UserError(f"{name}: {told}{detail}") from None


def _not_here(offline: bool, where: str) -> str:
    why = "HF_HUB_OFFLINE is set" if offline else f"{where} cannot be reached"
    mend = "unset it" if offline else "check the network"
    return f"not in the local Hub cache, and {why}; {mend}, or give a directory"


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f" ({lines[0].strip()})" if lines else ""
