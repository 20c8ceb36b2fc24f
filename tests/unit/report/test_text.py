from __future__ import annotations

from shardfold.report import summary_text

from ..plans.made import made

TEXT = """\
Plan on 4x8xh100, mesh node=4 x gpu0=2 x gpu1=4
8.03B parameters, 14 operators, adamw, bf16, roofline costs

operator                   split            collectives                     step
--------------------------------------------------------------------------------
layers.* (2 times)                                                         30.0%
  attention.query, key     batch/4 heads/8  bwd reduce node 4.0 MiB        20.0%
    linear
  norm pow, mul            batch/4                                          2.0%
  add                      unsplit                                          8.0%
head linear                batch/4 vocab/8  fwd gather all 8.0 MiB         69.8%
                                            bwd scatter gpu 16.0 MiB
3 small operators                                                           0.2%

                   step             memory   limit 72.0 GiB
this plan        1.00 s           60.0 GiB   fits
data parallel    2.50 s   2.50x   90.0 GiB   DOES NOT FIT
fully sharded    1.50 s   1.50x   20.0 GiB   fits

Step: compute 600 ms, communication 300 ms, update 100 ms; proven optimal under
  this cost model.
Meshes tried: 4x2x4 is best; 2x2x8 +25.0%.
No rule for mine.op (2 of them): planned unsplit, at least 2.00% of the step, as
  its arithmetic is unknown. See docs/how-to/add-a-rule.md.
1 operator has nothing to split (arange): computed on every device, 0.00% of the
  step.
Captured in 1.50 s, searched in 250 ms."""


def test_a_plan_prints_itself() -> None:
    assert str(made()) == TEXT


def test_a_plan_that_does_not_fit_says_what_to_try() -> None:
    text = str(made(fits=False))
    assert "No plan fits in memory; the smallest plan needs 55.0 GiB." in text
    assert "proven the fastest if memory did not count" in " ".join(text.split())
    assert summary_text.comparison(made(fits=False))[0].fits is False


def test_a_plan_that_is_not_proven_states_its_gap() -> None:
    assert (
        summary_text.proof(made(optimal=False))
        == "at most 2.00% above the best (lower bound 980 ms)"
    )
