import msgspec
import numpy as np
import pytest

from shardfold.costs.profile import (
    FORMAT,
    VERSION,
    HostEntry,
    Interpolated,
    Machine,
    Profile,
    Rates,
    Table,
    dumps,
    fitted,
    least_seconds,
    load,
    loads,
    sealed,
)
from shardfold.errors import ProfileError


def profile() -> Profile:
    table = Table("matmul.nt", "float32", ((64, 128), (64,), (64,)), (1e-4, None))
    return sealed(
        Profile(
            FORMAT,
            VERSION,
            Machine("some CPU", "cpu", 2, 1 << 34),
            {"torch": "2.13"},
            Rates({"float32": 1e11}, 1e10),
            (table,),
            (HostEntry("aten.mul", 1e-6, 2e-6),),
        )
    )


def test_a_saved_profile_loads_equal(tmp_path) -> None:
    made = profile()
    made.save(tmp_path / "machine.json")
    assert load(tmp_path / "machine.json") == made


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.99])
def test_a_truncated_profile_is_refused(keep: float) -> None:
    text = dumps(profile()).encode()
    with pytest.raises(ProfileError, match="truncated"):
        loads(text[: int(keep * len(text))])


@pytest.mark.parametrize("edit", [("1e-6", "1e-9"), ("some CPU", "some GPU"), ('"2.13"', '"2.12"')])
def test_an_edited_profile_is_refused(edit: tuple[str, str]) -> None:
    text = dumps(profile())
    edited = text.replace(*edit)
    if edited == text:  # msgspec may write a number in another way
        edited = text.replace("0.000001", "0.000000001")
    assert edited != text
    with pytest.raises(ProfileError, match="not as it was written"):
        loads(edited.encode())


def test_a_newer_version_and_another_file_are_refused() -> None:
    plain = msgspec.json.decode(dumps(profile()))
    with pytest.raises(ProfileError, match="reads up to"):
        loads(msgspec.json.encode(plain | {"version": VERSION + 1}))
    with pytest.raises(ProfileError, match="not a shardfold profile"):
        loads(b'{"format": "shardfold-plan"}')


def test_a_table_of_the_wrong_size_is_damage() -> None:
    plain = msgspec.json.decode(dumps(profile()))
    plain["tables"][0]["seconds"] = [1e-4]
    with pytest.raises(ProfileError, match=r"damaged.*1 times for a grid of 2x1x1"):
        loads(msgspec.json.encode(plain))


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ProfileError, match=r"Cannot read the profile .*absent\.json"):
        load(tmp_path / "absent.json")


RATES = Rates({"float32": 1e11}, 1e10)
GRID = ((64.0, 256.0, 1024.0), (64.0, 512.0), (32.0, 256.0))


def table(efficiency: float = 2.0) -> Table:
    sizes = np.meshgrid(*map(np.array, GRID), indexing="ij")
    seconds = least_seconds("matmul.nt", "float32", sizes, RATES) * efficiency
    return Table("matmul.nt", "float32", GRID, tuple(map(float, seconds.ravel())))


def test_the_grid_itself_is_returned() -> None:
    found = Interpolated(table(), RATES)
    given = np.array(table().seconds).reshape(3, 2, 2)
    for i, m in enumerate(GRID[0]):
        assert found.seconds(([m], [512.0], [256.0]))[0] == pytest.approx(given[i, 1, 1])


def test_a_constant_factor_holds_between_and_beyond() -> None:
    found = Interpolated(table(3.0), RATES)
    for sizes in ((100.0, 100.0, 100.0), (5000.0, 700.0, 300.0)):
        expected = 3.0 * least_seconds("matmul.nt", "float32", sizes, RATES)
        assert found.seconds([[s] for s in sizes])[0] == pytest.approx(float(expected))


def test_nothing_is_faster_than_the_fastest_kernel_measured() -> None:
    found = Interpolated(table(), RATES)
    assert found.seconds(([1.0], [1.0], [1.0]))[0] == pytest.approx(min(table().seconds))


def test_far_beyond_the_grid_is_said() -> None:
    found = Interpolated(table(), RATES)
    assert not found.beyond(([2000.0], [512.0], [256.0]))
    assert found.beyond(([3000.0], [512.0], [256.0]))


def test_what_was_not_measured_takes_the_nearest_factor() -> None:
    seconds = list(table(4.0).seconds)
    seconds[-1] = None
    gaps = Table("matmul.nt", "float32", GRID, tuple(seconds))
    whole = least_seconds("matmul.nt", "float32", (1024.0, 512.0, 256.0), RATES)
    assert Interpolated(gaps, RATES).seconds(([1024.0], [512.0], [256.0]))[0] == pytest.approx(
        4.0 * float(whole)
    )


def test_the_fit_is_the_error_at_the_probes() -> None:
    least = float(least_seconds("matmul.nt", "float32", (128.0, 128.0, 128.0), RATES))
    probes = [((128, 128, 128), 2.0 * least), ((128, 128, 128), 2.5 * least)]
    fit = fitted(table(2.0), probes, RATES).fit
    assert fit is not None
    assert (fit.probes, fit.median, fit.worst) == (2, 0.1, 0.2)
