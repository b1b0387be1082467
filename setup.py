"""The packages of the distribution: three folders at the top go into ``dsa_compile``."""

from setuptools import find_packages, setup

TOP = ("passes", "lowering", "runtime")

setup(
    packages=[
        *find_packages(include=["dsa_compile", "dsa_compile.*"]),
        *(
            f"dsa_compile.{name}"
            for top in TOP
            for name in find_packages(include=[top, f"{top}.*"])
        ),
    ],
    package_dir={f"dsa_compile.{top}": top for top in TOP},
)
