"""What Sphinx builds the site from: `make site`.

The pages are the repository's own, where they lie, so that their links lead to the same places in
the repository and on the site. Only the API reference, beside this file, is for the site alone.
"""

import shutil
from pathlib import Path

from sphinx.application import Sphinx

import shoal
from shoal.cli import main as run_command

project = "shoal"
author = "shoal contributors"
copyright = author  # noqa: A001 - Sphinx's name
version = release = shoal.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.ipynb", "docs/decisions/*.md", "docs/site/*.rst"]
include_patterns += ["bench/**.md", "packaging/*.md"]
exclude_patterns = [".*", "build", "dist", "native", "src", "tests"]

html_theme = "furo"
html_title = f"shoal {version}"
smartquotes = False  # they would turn the dashes of --options into one

myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = nb_execution_show_tb = True
nb_execution_timeout = 120  # seconds

default_role = "py:obj"  # `name` in a docstring is a link where the reference has that name
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["jax", "keras", "tensorflow", "torchft"]  # not installed here
napoleon_custom_sections = [
    ("Every call takes these keywords", "params_style"),
    ("Every call raises", "Raises"),
]
nitpicky = True
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!shoal\.).*|shoal\._native\..*")]

# The order of the pages in the margin. README's own links to them are sentences and tables.
PAGES = {
    "Use it": [
        *("tutorial", "torch", "frameworks", "arrays", "averaging", "compression", "local_steps"),
        *("servers", "settings", "cluster", "training", "horovod", "site/api"),
    ],
    "When something is wrong": ["hang", "errors", "dump", "top", "check", "views", "elastic"],
    "How it works": [
        *("architecture", "algorithms", "planner", "simulation", "threads", "wire", "bits"),
        "decisions/README",
    ],
    "Measuring it": [
        "bench",
        "lab",
        "/bench/README",
        "/bench/training",
        "/bench/LOG",
        "/bench/gpu/report",
    ],
    "The project": ["/CONTRIBUTING", "/CHANGELOG", "/SECURITY", "/packaging/RELEASE"],
}

TRACES = {
    "ring": ["--ranks", "4"],
    "tree": ["--ranks", "8"],
    "halving": ["--ranks", "8"],
    "sharded": ["--ranks", "4"],
    "ring_2d": ["--hosts", "2x4"],
    "fairring": ["--hosts", "2x4"],
}
"""The algorithms of all-reduce that the site plays, and on what."""


def add_to_page(_: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what only the site has: the pages in the margin, and links to the traces."""
    if page == root_doc:
        for caption, names in PAGES.items():
            paths = [name if name.startswith("/") else f"/docs/{name}" for name in names]
            source[0] += toctree(paths, f":caption: {caption}")
    elif page == "docs/decisions/README":
        source[0] += toctree(["0*"], ":glob:")
    elif page == "bench/LOG":
        source[0] += toctree(["log/*"], ":glob:")
    elif page == "docs/algorithms":
        links = " · ".join(f'<a href="../traces/{name}.html">{name}</a>' for name in TRACES)
        mark = "<!-- The site lists its traces here. -->"
        assert mark in source[0]
        source[0] = source[0].replace(mark, f"Watch one here: {links}.")


def toctree(paths: list[str], *options: str) -> str:
    """Return a list of pages that shows in the margin only."""
    return "\n".join(["", "", "```{toctree}", ":hidden:", *options, "", *paths, "```", ""])


def add_files(app: Sphinx, error: Exception | None) -> None:
    """Write the traces, and the first page under the name that web servers look for."""
    if error is None:
        traces = Path(app.outdir) / "traces"
        traces.mkdir(exist_ok=True)
        for name, ranks in TRACES.items():
            if run_command(["trace", name, *ranks, "--html", str(traces / f"{name}.html")]):
                raise RuntimeError(f"shoal trace {name} failed")
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def is_skipped(_: Sphinx, __: str, ___: str, member: object, *____: object) -> bool | None:
    """Return True for the fields of a NamedTuple, which the docstring of its class describes."""
    return (getattr(member, "__doc__", None) or "").startswith("Alias for field") or None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", is_skipped)
    app.connect("source-read", add_to_page)
    app.connect("build-finished", add_files)
