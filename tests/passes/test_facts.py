"""Facts read from the passes' sources without torch are those of the imported passes."""

import subprocess
import sys

from dsa_compile.passes.facts import built_in
from dsa_compile.passes.options import facts_of_pipeline
from dsa_compile.passes.pipeline import PIPELINE


def test_facts_read_are_those_of_the_classes() -> None:
    assert built_in() == facts_of_pipeline(PIPELINE)


def test_reading_them_imports_no_torch() -> None:
    code = (
        "import sys; from dsa_compile.passes.listing import listing; list(listing())\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
