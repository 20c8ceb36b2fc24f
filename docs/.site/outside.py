"""The site's table of contents, and links from its pages to files that are not pages.

Every page of a folder is in the contents, those named here first. A link to a file outside the
documentation, such as an example, has no page on the site: it is shown as what it is, a path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")

FOLDERS = {
    "How to": (
        "how-to",
        "plan-your-own-model hugging-face describe-a-cluster read-a-report "
        "compare explain-and-pin launch shell-and-notebook",
    ),
    "Explanation": (
        "explanation",
        "architecture capture sharding clusters costs search folding plans running",
    ),
    "Reference": ("reference", "cli python glossary operators clusters zoo"),
    "Results": ("results", "index"),
    "Decisions": ("decisions", ""),
}


def on_config(config: Any) -> Any:
    """Put every page into the contents."""
    root = Path(config["docs_dir"])
    config["nav"] = ["index.md", "tutorial.md"]
    for title, (folder, first) in FOLDERS.items():
        order = first.split()
        names = sorted(
            (page.stem for page in (root / folder).glob("*.md")),
            key=lambda name: (order.index(name) if name in order else len(order), name),
        )
        config["nav"].append({title: [f"{folder}/{name}.md" for name in names]})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave the folder of the documentation by their texts and paths."""
    root = Path(config["docs_dir"]).resolve()
    here = (root / page.file.src_uri).parent

    def shown(found: re.Match[str]) -> str:
        text, target = found.groups()
        if re.match(r"[a-z]+:|#|/", target):
            return found[0]
        path = (here / target.partition("#")[0]).resolve()
        if path.is_relative_to(root):
            return found[0]
        inside = f"`{path.relative_to(root.parent)}`"
        return inside if text.strip("`") in inside else f"{text} ({inside})"

    return LINK.sub(shown, markdown)
