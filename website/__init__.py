"""How the documentation site is built: what mkdocs cannot do by itself. `make docs` runs it; no part of the package."""
