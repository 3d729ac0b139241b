"""Formulas as MathML, which browsers draw themselves: a page loads no script and no font from elsewhere."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

#: What separates two formulas of one block. A narrow screen shows them in several lines.
BETWEEN = re.compile(r",?\s*\\q?quad\s*|\\\\\s*")


def _inline(self: Any, node: nodes.Element) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.Element) -> None:
    parts = [part.replace("&", "").strip() for part in BETWEEN.split(node.astext())]
    drawn = "".join(tex2mathml(part, as_block=True) for part in parts if part)
    self.body.append(f'<div class="formulas">{drawn}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer ``mathml``. A formula that docutils cannot translate is an error."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
