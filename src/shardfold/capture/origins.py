"""Where in the user's model a traced node comes from."""

from __future__ import annotations

import re

from torch import fx

from shardfold.graph import Origin

FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def origin_of(node: fx.Node) -> Origin:
    """Module path and source line of a node; the line is that of the innermost user frame."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    source = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    return Origin(stack[-1][0] if stack else "", source)
