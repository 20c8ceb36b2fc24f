import msgspec
import pytest

from shardfold.costs.profile.profile import (
    FORMAT,
    VERSION,
    HostEntry,
    Machine,
    Profile,
    Rates,
    Table,
    dumps,
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
