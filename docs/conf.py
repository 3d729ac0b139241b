"""Sphinx's configuration of the documentation: ``sphinx-build -W docs docs/_build`` builds the site."""

from __future__ import annotations

import sys
from pathlib import Path

import cunorm

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS / "extensions"))

project = "cunorm"
author = "the cunorm developers"
version = release = cunorm.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "api_links",
    "mathml",
    "pictures",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
default_role = "py:obj"
# Names of cunorm in docstrings are links. Other names in backticks, such as those of arguments, need not be.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!cunorm\.).*")]

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_typehints = "none"
numpydoc_show_class_members = False

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "cunorm"
html_static_path = ["_static"]
html_css_files = ["cunorm.css"]
html_domain_indices = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
