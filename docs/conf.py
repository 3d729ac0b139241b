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
    "sphinx_gallery.gen_gallery",
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

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_typehints = "none"
numpydoc_show_class_members = False

#: The scripts that are pages. The other files of the folder are parts of them, or are for a terminal.
SHOWN = ("first_call", "tune_training_run")
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "examples",
    "copyfile_regex": r"index\.rst",
    "filename_pattern": "",
    "ignore_pattern": rf"^(?!({'|'.join(SHOWN)})\.py$)",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": (),
    "reset_modules": (),
    "abort_on_example_error": True,
    # A page does not change with the machine that builds it.
    "show_memory": False,
    "min_reported_time": float("inf"),
    "write_computation_times": False,
    "show_signature": False,
    "download_all_examples": False,
}

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "cunorm"
html_static_path = ["_static"]
html_css_files = ["cunorm.css"]
html_domain_indices = False
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"getting-started": []}
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    # Examples have wide outputs.
    "secondary_sidebar_items": {
        "examples/*": [],
        **{name: ["page-toc"] for name in ("getting-started", "guide/*", "speed/*", "reference/*", "contributing/*")},
    },
    "footer_start": ["copyright"],
    "footer_end": [],
}
