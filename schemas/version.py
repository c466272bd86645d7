"""The version of the project: pyproject.toml, `novelty --version` and manifests use this one."""

VERSION = "0.1.0"
