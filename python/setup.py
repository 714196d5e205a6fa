"""What pyproject.toml cannot say: a wheel that has libcuvmm.so, which scripts/python-wheel.sh puts into the package, is for one
platform and any Python 3."""

from __future__ import annotations

import pathlib
from typing import Tuple

from setuptools import Distribution, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel  # setuptools 70.1 and later
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

HAS_LIBRARY = pathlib.Path(__file__).with_name("cuvmm").joinpath("libcuvmm.so").exists()


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return HAS_LIBRARY


class Wheel(bdist_wheel):
    def get_tag(self) -> Tuple[str, str, str]:
        platform: str = super().get_tag()[2]
        return "py3", "none", platform


setup(distclass=Package, cmdclass={"bdist_wheel": Wheel})
