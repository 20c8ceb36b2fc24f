"""Every option is in one request: checked when it is given, kept in the plan, said by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardfold.cli.options import PLANNING
from shardfold.cli.plan import plan
from shardfold.costs.profile import Profile, load
from shardfold.errors import InputError, ProfileError
from shardfold.planner.options import Options, Request, bytes_in

H200 = Path(__file__).parents[3] / "benchmarks" / "profiles" / "h200.json"


@pytest.fixture(scope="module")
def measured() -> Profile:
    return load(H200)


def test_the_request_the_options_and_the_command_line_have_the_same_names() -> None:
    assert tuple(Options.__annotations__) == Request.__struct_fields__
    assert tuple(name for name in Options.__annotations__ if name != "dtype") == (*PLANNING,)


def test_every_option_is_documented_once() -> None:
    assert Options.__doc__ is not None
    for name in Options.__annotations__:
        assert Options.__doc__.count(f"- `{name}` (") == 1


def test_the_precision_has_an_older_name() -> None:
    (precision,) = (o for o in plan.params if o.name == "precision")
    assert set(precision.opts) == {"--precision", "--dtype"}
    given = Request().changed({"dtype": "bf16"})
    assert given == Request().changed({"precision": "bf16"}) == given.changed({"dtype": "bf16"})
    assert given.changed({"precision": None}).numbers is None
    assert Request(dtype="bf16").changed({"precision": "bf16-mixed"}).numbers == "bf16-mixed"
    with pytest.raises(InputError, match="give one of them"):
        Request().changed({"precision": "bf16-mixed", "dtype": "bf16"})
    with pytest.raises(InputError, match=r"loss that is scaled.*use bf16-mixed"):
        Request().changed({"precision": "fp16-mixed"})


def test_a_stack_is_told_what_a_step_computes_in() -> None:
    for name, plain in (("bf16-mixed/bf16", "bf16"), ("fp32", "fp32"), (None, None)):
        assert Request(precision=name).without_masters.numbers == plain


@pytest.mark.parametrize(
    ("given", "found"),
    [("40GiB", 40 * 2**30), ("1500", 1500), (1500, 1500), ("2.5G", 2.5 * 2**30), (1e9, 1e9)],
)
def test_a_memory_limit_is_a_number_or_a_text(given: Any, found: float) -> None:
    assert Request().changed({"memory_limit": given}).memory_limit == found


@pytest.mark.parametrize("size", ["", "GiB", "fast", "-1GiB", "0", "inf", "nan", -1, float("nan")])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(InputError, match=r"is not a size|positive and finite"):
        bytes_in(size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limits": 1}, r"no option 'memory_limits'\. Did you mean memory_limit\?"),
        ({"passes": 2}, r"no option 'passes'\. It is called micro_batches now\."),
        ({"recompute": "sometimes"}, "Unknown recompute 'sometimes'"),
        ({"micro_batches": 0}, "1 micro-batch or more, got 0"),
        ({"micro_batches": True}, "1 micro-batch or more, got True"),
        ({"micro_batches": 10**9}, "at most 1,000,000 micro-batches, got 1,000,000,000"),
        ({"micro_batches": "sometimes"}, "Unknown number of micro-batches"),
        ({"optimizer": "adan"}, "Unknown optimizer 'adan'"),
        ({"cost": "papr"}, "Unknown cost model 'papr'"),
        ({"pins": ["fc"]}, "The pin 'fc' cannot be read"),
        ({"imbalance": 0.5}, "imbalance of experts is at least 1 .*, got 0.5"),
    ],
)
def test_a_wrong_option_is_refused_in_words(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request().changed(options)


def test_changes_keep_the_rest() -> None:
    before = Request().changed({"pins": {"fc*": "out/2"}, "recompute": "never", "dtype": "bf16"})
    after = before.changed({"memory_limit": "1GiB"})
    assert (after.pins, after.recompute, after.numbers) == (("fc*=out/2",), "never", "bf16")
    assert after.memory_limit == 2**30
    assert after.changed({"memory_limit": None}).memory_limit is None


def test_a_profile_is_kept_by_its_file_and_digest(measured: Profile, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    measured.save(file)
    request = Request().changed({"profile": file})
    assert request.cost == "measured"
    assert request.profile is not None
    assert (request.profile.file, request.profile.digest) == (str(file), measured.digest)
    assert request.profile_for(None) == measured
    assert request.changed({"profile": None}).cost == "kernels"
    file.unlink()
    with pytest.raises(ProfileError, match=r"machine\.json .*not there.*--profile"):
        request.profile_for(None)
    assert request.profile_for(None, measured) == measured
    assert request.profile_for(measured) == measured
