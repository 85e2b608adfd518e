"""Settings of the site; `make docs` builds it, and a warning is an error."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

from kvjax.version import __version__  # noqa: E402

project = "kvjax"
author = "the authors of kvjax"
project_copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.githubpages",
    "kvjax_site",
]
exclude_patterns = ["_build", "_ext", "Thumbs.db", ".DS_Store"]

#: Address below which the files of the repository are shown, such as "https://github.com/OWNER/NAME/blob/main". Until
#: there is one, files without a page are named as text.
repository = ""

# Docstrings name things with one backtick, and are in Google's style.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the docstrings, beside shapes
autodoc_inherit_docstrings = False  # a method without a docstring is documented in its base class
# Attributes of a dataclass are a list, not entries of their own: many are properties too, which would be there twice.
napoleon_use_ivar = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False

myst_enable_extensions = ["colon_fence", "attrs_inline", "attrs_block", "linkify"]
myst_linkify_fuzzy_links = False
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests execute the notebooks, and they are shipped with outputs

# `make docs ARGS="-t plain"` checks texts, docstrings and links, without what takes longest: maps of kept slots, which
# are programs that are compiled and run, and the theme, whose sidebar is made anew for every page.
plain = tags.has("plain")  # type: ignore[name-defined]  # noqa: F821
maps = not plain

html_theme = "basic" if plain else "sphinx_book_theme"
html_title = "kvjax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
book_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # the sidebar has a search field already
    # The sidebar is made anew for every page: only the branch of the page itself, in two levels.
    "collapse_navigation": True,
    "navigation_depth": 2,
}
html_theme_options = {} if plain else book_theme_options
html_copy_source = False
html_last_updated_fmt = ""
