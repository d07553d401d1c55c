"""Lists the packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lightning_dynmo*"]), "lightning_dynmo.triton_kernels"])
