"""Cuts of a model into stages: as good as any cut with any choice for each stage."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product
from math import inf

import pytest

from shardfold.planner.cuts import LayerFigures, cut_layers


def every_step(
    figures: list[list[LayerFigures]], flying: list[int], room: float, micro_batches: int
) -> float:
    """The least additive step of all cuts and all choices for each stage; inf: none fits."""
    count, best = len(figures[0][0].seconds), inf
    for inner in combinations(range(1, count), len(flying) - 1):
        spans = list(pairwise((0, *inner, count)))
        for chosen in product(*figures):
            stages = list(zip(spans, flying, chosen, strict=True))
            if all(held(of, a, b, number) <= room for (a, b), number, of in stages):
                times = [sum(of.seconds[a:b]) for (a, b), _, of in stages]
                best = min(best, sum(times) + (micro_batches - 1) * max(times))
    return best


def held(figures: LayerFigures, begin: int, end: int, flying: int) -> float:
    kept = flying * sum(figures.kept[begin:end])
    return sum(figures.resident[begin:end]) + kept + figures.passing


def drawn(rng: random.Random, layers: int) -> LayerFigures:
    of_layers = [[rng.choice((1, 2, 3, 5)) for _ in range(layers)] for _ in range(3)]
    return LayerFigures(*of_layers, passing=rng.randint(0, 3))


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_no_cut_and_no_choice_of_any_stage_has_a_shorter_step(choices: int) -> None:
    """Over numbers of stages and of micro-batches, under GPipe and 1F1B, too."""
    rng = random.Random(choices)
    refused = mixed = 0
    for _ in range(300):
        layers = rng.randint(1, 7 if choices < 3 else 5)
        every = [drawn(rng, layers) for _ in range(choices + 1)]
        room = rng.choice((inf, rng.uniform(5, 40)))
        least, found = inf, inf
        for stages, micro_batches in product(range(1, min(layers, 4) + 1), (1, 2, 5)):
            in_turns = [min(micro_batches, stages - k) for k in range(stages)]
            for flying in (in_turns, [micro_batches] * stages):
                # Now and then the last stage has other choices, as a part of another size has.
                figures = [every[:choices]] * stages
                if choices > 1 and rng.random() < 0.3:
                    figures[-1] = every[1:]
                given = (figures, flying, room, micro_batches)
                expected, cut = every_step(*given), cut_layers(*given)
                least = min(least, expected)
                if cut is None:
                    assert expected == inf
                    refused += 1
                    continue
                assert len(cut.counts) == len(cut.choices) == stages
                ends = [sum(cut.counts[:k]) for k in range(stages + 1)]
                stated = [own[k] for own, k in zip(figures, cut.choices, strict=True)]
                spans = zip(pairwise(ends), stated, flying, strict=True)
                assert all(held(of, a, b, number) <= room for (a, b), of, number in spans)
                times = [
                    sum(of.seconds[a:b]) for (a, b), of in zip(pairwise(ends), stated, strict=True)
                ]
                step = sum(times) + (micro_batches - 1) * max(times)
                assert step == pytest.approx(expected)
                found = min(found, step)
                mixed += len(set(cut.choices)) > 1
        assert found == pytest.approx(least)
    assert refused > 20
    assert choices == 1 or mixed > 100
