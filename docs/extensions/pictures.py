"""Pictures link to their files, which a phone can enlarge. The dark theme shows NAME-dark.svg for NAME.svg."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform


class DarkTwins(SphinxTransform):
    """Follow each image by its dark twin. The theme shows one of the two, by their classes."""

    default_priority = 200  # before Sphinx collects the files of images

    def apply(self, **_: Any) -> None:
        """See the class."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            twin = image["uri"].removesuffix(".svg") + "-dark.svg"
            if image["uri"].endswith(".svg") and (folder / twin).exists():
                copy = image.copy()
                copy["uri"] = twin
                copy["classes"] = [*image["classes"], "only-dark"]
                image["classes"] = [*image["classes"], "only-light"]
                image.parent.insert(image.parent.index(image) + 1, copy)


IMAGE = re.compile(r'<img [^>]*?src="([^"]+\.svg)"[^>]*>')


def _linked(found: re.Match[str]) -> str:
    theme = re.search(r"only-(?:light|dark)", found[0])
    return f'<a class="{theme[0] if theme else ""}" href="{found[1]}">{found[0]}</a>'


def link_pictures(_: Any, name: str, template: str, context: dict[str, Any], __: Any) -> None:
    """Let each picture of a page link to its file."""
    if "body" in context:
        context["body"] = IMAGE.sub(_linked, context["body"])


def setup(app: Any) -> dict[str, bool]:
    """Register both."""
    app.add_transform(DarkTwins)
    app.connect("html-page-context", link_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
