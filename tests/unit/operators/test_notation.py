"""The notation reads what it prints, and says what is wrong with what it cannot read."""

from __future__ import annotations

import pytest

from shardfold.graph import Op, Operand, TensorType
from shardfold.operators.notation import Call, Rule

SIZES = {"b": 8, "s": 16, "h": 4, "d": 2, "m": 32, "n": 64}


@pytest.mark.parametrize(
    "notation",
    ["b s m, n m -> b s n", "b s (h d) -> b h s d", "b . m -> b", "b, -> b", "b s -> "],
)
def test_a_rule_prints_as_it_was_read(notation: str) -> None:
    rule = Rule.parse(notation, SIZES)
    again = Rule.parse(str(rule), SIZES)
    assert (again.operands, again.results) == (rule.operands, rule.results)


def test_reduced_factors_are_those_of_no_result() -> None:
    rule = Rule.parse("b s m, n m -> b s n", SIZES)
    assert rule.factors == ("b", "s", "m", "n")
    assert rule.reduced == {"m"}
    assert rule.points == 8 * 16 * 32 * 64


def test_work_may_run_over_some_factors_only() -> None:
    assert Rule.parse("b s, n m -> b s m", SIZES, over=("b", "s")).points == 128


def test_a_rule_without_an_arrow_is_refused() -> None:
    with pytest.raises(ValueError, match="needs '->'"):
        Rule.parse("b s m", SIZES)


def test_a_factor_without_a_size_is_named() -> None:
    with pytest.raises(ValueError, match="without a size: x in b x -> b"):
        Rule.parse("b x -> b", SIZES)
    with pytest.raises(ValueError, match="without a size: z"):
        Rule.parse("b -> b", SIZES, whole=frozenset({"z"}))


def call(*shapes: tuple[int, ...], result: tuple[int, ...]) -> Call:
    operands = tuple(Operand(name, i) for i, name in enumerate("xyz"[: len(shapes)]))
    op = Op("op", "user.op", operands, (len(shapes),), {"dim": 1, "empty": None})
    types = [TensorType(shape, "float32") for shape in (*shapes, result)]
    return Call(op, tuple(types[:-1]), (types[-1],))


def test_dots_stand_for_any_further_dims() -> None:
    rule = call((2, 3, 5), (7, 5), result=(2, 3, 7)).rule({"x": "... m", "y": "n m"}, "... n")
    assert str(rule) == "i0 i1 m, n m -> i0 i1 n"
    assert dict(rule.sizes) == {"i0": 2, "i1": 3, "m": 5, "n": 7}


def test_a_dim_of_size_one_carries_no_factor() -> None:
    rule = call((1, 5), result=(4, 5)).rule({"x": "b m"}, "b m", sizes={"b": 4})
    assert str(rule) == ". m -> b m"


def test_an_operand_that_the_notation_does_not_name_is_undescribed() -> None:
    rule = call((2, 3), (4, 4), result=(2, 3)).rule({"x": "a b"}, "a b", saves=("x", "absent"))
    assert rule.operands[1] == ((), ())
    assert rule.saves == (0,)


def test_a_notation_that_does_not_fit_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit the shape"):
        call((2, 3), result=(2,)).rule({"x": "a b c"}, "a")
    with pytest.raises(ValueError, match="does not fit the shape"):
        call((2, 3, 4), result=(2,)).rule({"x": "a b"}, "a")


def test_attributes_that_were_left_out_take_the_default() -> None:
    found = call((2,), result=(2,))
    assert found.attribute("dim") == 1
    assert found.attribute("empty", 7) == 7
    assert found.attribute("absent", 7) == 7
