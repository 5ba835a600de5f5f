"""The folders that are installed, and the import names of the three that are not called recbft."""

from setuptools import find_packages, setup

RENAMED = {"recbft_cli": "cli", "recbft_cards": "data", "recbft_configs": "configs"}

setup(
    packages=[*find_packages(include=["recbft", "recbft.*"]), *RENAMED],
    package_dir=RENAMED,
    include_package_data=False,  # exactly what is named here, whatever MANIFEST.in adds to a source distribution
    package_data={
        "recbft": ["py.typed", "kernels/*/*.[ch]", "recbole/defaults/*.yaml", "reporting/page.css", "api/*.yaml"],
        "recbft_cards": ["*.yaml"],
        "recbft_configs": ["**/*.yaml"],
    },
)
