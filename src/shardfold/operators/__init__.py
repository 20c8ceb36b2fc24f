"""Every operator described in one place: splits, kernels, what backward saves, aliasing, names."""

from shardfold.operators.kernels import Access, Kernel, LocalWork
from shardfold.operators.notation import Call, Exchange, Rule
from shardfold.operators.operator import Extra, Maker, Operator
from shardfold.operators.registry import REGISTRY, Rules, operator_of, rule_for, rules_of

__all__ = [
    "REGISTRY",
    "Access",
    "Call",
    "Exchange",
    "Extra",
    "Kernel",
    "LocalWork",
    "Maker",
    "Operator",
    "Rule",
    "Rules",
    "operator_of",
    "rule_for",
    "rules_of",
]
