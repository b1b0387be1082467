"""Output of ``dsa-inspect ARTIFACT verify``: the verdict first, in 80 columns."""

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from dsa_compile.cli.inspect.output import lines, styled, table

if TYPE_CHECKING:
    from dsa_compile.verify.checks.report import PassReport, SiteReport, VerifyReport

WORST = 10


def print_report(
    out: Console, report: "VerifyReport", everything: bool, path: str, fresh: str
) -> None:
    """Print the verdict, what is wrong, what to run next, and then the tables.

    Args:
        out: where to.
        report: of the verification.
        everything: list every rewrite.
        path: of the artifact, as it was given.
        fresh: a command that compiles it again.
    """
    problems = _problems(report)
    runs = sum(done.runs for done in report.passes)
    made = f"{sum(done.sites for done in report.passes)} rewrites, {runs} runs of both sides"
    verdict = f"{len(problems)} wrong" if problems else "all right"
    verdict += " in a sample" if report.sampled else ""
    out.print(styled(f"{verdict}: {made}, {report.seconds:.1f} s",
                     "bold red" if problems else "bold green"))  # fmt: skip
    for problem in problems:
        lines(out, "wrong:", problem, "red")
    for done in report.passes:
        if done.note:
            lines(out, "note:", f"{done.name} {done.note}", "yellow")
    if report.sampled:
        lines(out, "sample:", report.sampled, "yellow")
    lines(out, "largest:", _largest(report))
    contexts = ", ".join(map(str, report.contexts))
    lines(out, "prompt:", f"{report.tokens} tokens in steps to {contexts}; "
                          f"index_topk {report.topk}")  # fmt: skip
    if report.contexts[-1] <= report.topk:
        lines(out, "", "no context exceeds index_topk: selection is not checked", "yellow")
    kernels = "kernels but for collectives" if report.several_ranks else "kernels"
    left = "the runtime's options"
    if report.sampled:  # bisect runs whole models alone
        lines(out, "unchecked:", f"what no sample shows, {kernels} and {left}")
    elif report.several_ranks:  # these kernels it does not test, either
        lines(out, "unchecked:", f"{kernels}; {left}, which bisect tests")
    else:
        left = left if report.kernels else f"{kernels} and {left}"
        lines(out, "unchecked:", f"{left}; bisect tests these too")
    if problems or not report.sampled:
        lines(out, "next:", _next(report, path, fresh), folded=False)
    out.print()
    _print_passes(out, report)
    _print_sites(out, report.sites if everything else (report.wrong or report.sites)[:WORST])


def _problems(report: "VerifyReport") -> list[str]:
    """Problems, a sentence each: a rewrite once, in the layer that shows it best."""
    found: dict[int, SiteReport] = {}
    for site in report.wrong:
        known = found.get(site.position)
        if known is None or site.share > known.share:
            found[site.position] = site
    sentences = [_site_problem(site) for site in found.values()]
    named = {site.pass_name for site in found.values()}
    sentences += [
        f"{done.name}: {done.problem}"
        for done in report.passes
        if done.problem and done.name not in named
    ]
    sentences += [
        f"{h.pass_name}{f' site {h.number}' if h.number else ''}: {h.problem}"
        for h in report.hazards
    ]
    sentences += [f"artifact: {problem}" for problem in report.emission]
    sentences += [f"weight {problem}" for problem in report.weights]
    return sentences + [f"kernel {kernel}: {kernel.problem}" for kernel in report.wrong_kernels]


def _site_problem(site: "SiteReport") -> str:
    where = " ".join(part for part in (site.region, site.path) if part)
    values = site.values[0] if site.values[0] == site.values[1] else " → ".join(site.values)
    return (
        f"{site.pass_name} site {site.number} ({where}), layer {site.layer}, "
        f"{site.inputs} inputs: {values} {site.problem}"
    )


def _largest(report: "VerifyReport") -> str:
    """The rewrite that is nearest to its limit, or furthest beyond it."""
    rounding = [site for site in report.sites if site.tolerance or not site.bitwise]
    if not rounding:
        return "0: every rewrite is equal to the last bit"
    worst = max(rounding, key=lambda site: (bool(site.problem), site.share, site.error))
    limit = f"limit {worst.tolerance:.1e}" if worst.tolerance else "limit: equal bits"
    return (
        f"error {_error(worst.error)}, {limit}{_margin(worst)}: "
        f"{worst.pass_name} site {worst.number}, layer {worst.layer}"
    )


def _margin(site: "SiteReport") -> str:
    if not site.tolerance or not site.error or not math.isfinite(site.error):
        return ""
    times = site.tolerance / site.error
    return f", {times:.1f} times below it" if times >= 1 else f", {1 / times:.1f} times above it"


def _next(report: "VerifyReport", path: str, fresh: str) -> str:
    from dsa_compile.verify.checks.report import EXPORT, SELECTION

    named = next(iter(report.wrong), None)
    if named is not None:
        return f"dsa-inspect {path} diff {named.pass_name} --site {named.number}"
    done = next((done for done in report.passes if done.problem), None)
    if done is not None and done.name in (EXPORT, SELECTION):
        return f"dsa-inspect {path} bisect --against reference"
    if done is not None:
        site = f" --site {done.suspect}" if done.suspect else ""
        return f"dsa-inspect {path} diff {done.name}{site}"
    if report.hazards:
        left = report.hazards[0].pass_name  # a pass, or what runs or calls the graphs of all
        passes = {done.name for done in report.passes}
        return f"dsa-inspect {path} " + (f"diff {left}" if left in passes else "graph")
    if report.emission and not report.weights:
        return f"{fresh} && dsa-inspect {path} compare fresh"
    return f"dsa-inspect {path} bisect --against reference"


def _print_passes(out: Console, report: "VerifyReport") -> None:
    shown = table(
        "pass", "sites", "runs", "promise", "worst\nsite", "worst\nlayer", "",
        right=("sites", "runs", "worst\nsite", "worst\nlayer"),
    )  # fmt: skip
    for done in report.passes:
        layers = max((median for median, _ in done.layers.values()), default=0.0)
        site = _error(done.error) if done.runs else ""
        cells = (str(done.sites), str(done.runs), done.numerics, site, _error(layers))
        shown.add_row(done.name, *cells, _verdict(report, done))
    out.print(shown)
    out.print()


def _print_sites(out: Console, sites: "list[SiteReport]") -> None:
    shown = table(
        "worst rewrites", "graph", "layer", "error", "limit", "margin", "inputs",
        right=("layer", "error", "limit", "margin"),
    )  # fmt: skip
    for site in sites:
        margin = site.tolerance / site.error if site.tolerance and site.error else 0.0
        shown.add_row(
            f"{site.pass_name} {site.number}",
            site.region,
            str(site.layer),
            _error(site.error),
            f"{site.tolerance:.1e}" if site.tolerance else "0 bits",
            f"{margin:.1f}×" if margin and math.isfinite(margin) else "",
            site.inputs,
            style="red" if site.problem else "",
        )
    out.print(shown)


def _error(error: float) -> str:
    return "0" if error == 0.0 else f"{error:.1e}"


def _verdict(report: "VerifyReport", done: "PassReport") -> Text:
    wrong = done.problem or any(site.pass_name == done.name for site in report.wrong)
    return styled("wrong" if wrong else "right", "red" if wrong else "green")
