"""Code such as ``cunorm.plan(...)`` in a page links to the API reference, if the reference has the name."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"(cunorm(?:\.\w+)*)(?:\(.*\))?", re.DOTALL)


class ApiLinks(SphinxPostTransform):
    """Link such code, except where it is part of a link already."""

    default_priority = 20  # after references have become links

    def run(self, **_: Any) -> None:
        """See the class."""
        known = self.env.domains.python_domain.objects
        for literal in list(self.document.findall(nodes.literal)):
            found = NAME.fullmatch(literal.astext())
            target = known.get(found[1]) if found else None
            if target and target.docname != self.env.docname and not isinstance(literal.parent, nodes.reference):
                link = make_refnode(
                    self.app.builder, self.env.docname, target.docname, target.node_id, literal.deepcopy()
                )
                literal.replace_self(link)


def setup(app: Any) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(ApiLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
