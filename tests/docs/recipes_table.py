"""The table of ``docs/recipes.md``, from the recipes as data."""

from collections.abc import Callable

from dsa_compile.facts.formats import RECIPES, Recipe
from tests.docs.commands import ROOT

PAGE = "docs/recipes.md"
_BEGIN, _END = "<!-- recipes -->\n", "<!-- end -->"
_LAYERS, _RANK, _ROPE, _INDEX = 61, 512, 64, 128  # DeepSeek-V3.2


def _latent(recipe: Recipe) -> str:
    rows, rotated = recipe.latent_rows, recipe.rotated_rows
    kept = str(rows) if rows == rotated else f"{rows}; rotary part {rotated}"
    return f"{kept}: {recipe.latent_bytes(_RANK, _ROPE):,} B"


def _caches(recipe: Recipe) -> str:
    row = recipe.latent_bytes(_RANK, _ROPE) + recipe.index_rows.row_bytes(_INDEX)
    return f"{_LAYERS * row / 1000:.0f} KB"


_ROWS: dict[str, Callable[[Recipe], str]] = {
    "weights of projections and experts": lambda recipe: str(recipe.weights),
    "what they multiply": lambda recipe: str(recipe.activations),
    "latent cache": _latent,
    "index cache": lambda r: f"{r.index_rows}: {r.index_rows.row_bytes(_INDEX):,} B",
    "index queries, of 128 values a head": lambda recipe: str(recipe.index_queries),
    "embedding, head, norms, `W_UK`, `W_UV`": lambda recipe: str(recipe.compute),
    "both caches, 61 layers": _caches,
}


def page() -> str:
    """The page with the table as it is now."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert after, f"{PAGE} has no table of recipes between its comments"
    return f"{before}{_BEGIN}{table()}{_END}{after}"


def table() -> str:
    """A column for each recipe."""
    heads = " | ".join(f"`{name}`" for name in RECIPES)
    lines = [f"| | {heads} |", "|---" * (len(RECIPES) + 1) + "|"]
    for row, cell in _ROWS.items():
        lines.append(f"| {row} | {' | '.join(map(cell, RECIPES.values()))} |")
    return "".join(f"{line}\n" for line in lines)
