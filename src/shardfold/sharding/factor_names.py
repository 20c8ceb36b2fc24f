"""Plain words for factors: batch, seq, heads, vocab, in, out.

A sub-dim has one identity across the graph, so a word that one operator knows (heads, from
attention) serves everywhere the sub-dim goes (the out features of the query projection).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardfold.graph import Graph
from shardfold.operators import REGISTRY
from shardfold.sharding.subdims import SubdimRule, Subdims

# What the factor is to the operator itself, where the sub-dim has no better name.
LOCAL: Mapping[str, str] = {
    "m": "in",
    "n": "out",
    "c": "in",
    "h": "height",
    "w": "width",
    "t": "time",
    "g": "groups",
    "d": "features",
    "e": "hidden",
    "v": "vocab",
}


def batch_classes(graph: Graph, subdims: Subdims) -> frozenset[int]:
    """The identities of the leading dim of every input: what data parallelism splits."""
    return frozenset(
        subdims.classes[i][0]
        for i, tensor in enumerate(graph.tensors)
        if tensor.role == "input" and subdims.classes[i]
    )


def words_of(graph: Graph, subdims: Subdims) -> dict[int, str]:
    """A word for every sub-dim that some operator or input can name."""
    words = dict.fromkeys(batch_classes(graph, subdims), "batch")
    order = {kind: place for place, kind in enumerate(REGISTRY)}  # the most telling first
    ops = range(len(graph.ops))
    for index in sorted(ops, key=lambda i: order.get(graph.ops[i].kind, len(order))):
        rule, factors = subdims.rules[index], subdims.factors[index]
        names = rule.rule.operator.words
        for factor, identity in enumerate(factors) if names else ():
            word = names.get(rule.base(factor))
            if word and _is_leading(rule, factor):
                words.setdefault(identity, word)
    for i, tensor in enumerate(graph.tensors):
        if tensor.role == "input" and not tensor.type.is_floating and len(tensor.type.shape) > 1:
            at = subdims.dims[i].index(1)
            words.setdefault(subdims.classes[i][at], "seq")
    return words


def _is_leading(rule: SubdimRule, factor: int) -> bool:
    return "." not in rule.factors[factor] or rule.factors[factor].endswith(".0")


def word(rule: SubdimRule, factor: int, identity: int, words: Mapping[int, str]) -> str:
    """The word for one factor of one operator."""
    base = rule.base(factor)
    found = words.get(identity) or LOCAL.get(base)
    if found:
        return found
    return f"dim{base[1:]}" if base[0] == "i" and base[1:].isdigit() else base
