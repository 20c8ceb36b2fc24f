"""How operators can be split: the rule notation, the table of rules, configurations, layouts."""

from shardfold.spaces.atoms import AtomicRule, Atoms, atomise
from shardfold.spaces.call import Call
from shardfold.spaces.rule import Exchange, Rule
from shardfold.spaces.rules import TABLE, Maker, rule_for, rules_of
from shardfold.spaces.space import Space, space_of

__all__ = [
    "TABLE",
    "AtomicRule",
    "Atoms",
    "Call",
    "Exchange",
    "Maker",
    "Rule",
    "Space",
    "atomise",
    "rule_for",
    "rules_of",
    "space_of",
]
