"""The documentation site, made from `docs/`, the other pages of the repository, and the code's docstrings.

`python -m website DIR` builds it; `make docs` serves it. `pages` collects the pages and corrects their links,
`reference` writes the pages that come from the code, and `building` runs Zensical, which makes HTML of them.
"""
