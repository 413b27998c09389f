"""Sphinx configuration of the documentation site: `make docs` builds it without network."""

import re

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

from tokenscale import __version__

project = "tokenscale"
author = "the tokenscale authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# MathML, which browsers draw themselves: MathJax would come from the network
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"tokenscale {version}"
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
autodoc_default_options = {"members": True, "undoc-members": False, "exclude-members": "__init__"}
autodoc_typehints = "signature"


def _rewrite(app, name, source):
    """Show links to files of the repository as code, and diagrams as text: the site has neither."""
    text = re.sub(r"\[`?([^\]`]+)`?\]\(\.\./([^)#]+)[^)]*\)", _file, source[0])
    source[0] = re.sub(r"^```mermaid$", "```text", text, flags=re.MULTILINE)
    # a fence whose info names a file: Sphinx knows the language alone
    source[0] = re.sub(r"^```(\w+) [\w./-]+$", r"```\1", source[0], flags=re.MULTILINE)


def _file(match):
    label, path = match.groups()
    return f"`{path}`" if label in path else f"{label} (`{path}`)"


def _inline_math(self, node):
    self.body.append(convert(node.astext()))
    raise SkipNode


def _block_math(self, node):
    self.body.append(f"<p>{convert(node.astext(), display='block')}</p>")
    raise SkipNode


def setup(app):
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("source-read", _rewrite)
