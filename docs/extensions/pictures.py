"""A picture NAME.svg that has a twin NAME-dark.svg beside it: pages in the dark theme show the twin."""

from __future__ import annotations

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


def setup(app: Any) -> dict[str, bool]:
    """Register the transform."""
    app.add_transform(DarkTwins)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
