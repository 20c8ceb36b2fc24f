"""The options of planning, in one list: as a caller gives them, and as a plan keeps them.

Everything that is asked for besides the model and the cluster is one `Request`. It is in the plan's
file, so that planning again, on other devices or with one option changed, keeps all the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

import msgspec

from shardfold.cluster import Mesh
from shardfold.costs import Profile, optimizer_named, pricing_named
from shardfold.costs.profile import load as load_profile
from shardfold.costs.registry import DEFAULT, MEASURED
from shardfold.errors import InputError, ProfileError, nearest
from shardfold.graph.precision import precision_named
from shardfold.strategies.pins import parse_pins

Recompute = Literal["auto", "never", "always", "attention", "products"]
MicroBatches = int | Literal["auto", "search"]
Stages = int | str  # auto, off, a number, or devices of each: 1+3
PARTS = r"[1-9][0-9]{0,6}(\+[1-9][0-9]{0,6})+"  # devices of each part of the cluster
Prefer = Literal["simple", "speed", "memory"]
Pins = Mapping[str, str] | Iterable[str] | None  # {pattern: split}, or texts "pattern=split"
MOST_MICRO_BATCHES = 1_000_000
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Names that options had before, and what each is called now.
RENAMED = {"passes": "micro_batches", "limit": "memory_limit", "recomputation": "recompute"}


class Options(TypedDict, total=False):
    """The options of `plan`, `compare`, `what_if` and `Planner`, each with its default.

    - `precision` (the model's own dtypes): `bf16-mixed` computes in bf16, with float32 master
      weights, gradients and optimizer state; gradients are reduced in float32, or in bf16 with
      `bf16-mixed/bf16`. `bf16`, `fp32`, `fp16` and `fp64` are for all of them alike; `tf32` is
      `fp32` with products in TF32. `fp8-mixed` (and `fp8`) have linear layers in float8: priced,
      not run.
    - `dtype` (none): the older name of `precision`; give one of them.
    - `compile` (`False`): the step is priced as `torch.compile` makes it, and run so.
    - `optimizer` (`adamw`): `sgd`, `momentum`, `adam` or `adamw`.
    - `mesh` (every one is tried): such as `4x8`, outermost level first, or a `Mesh`.
    - `cost` (`kernels`): the cost model, `kernels`, `roofline` or `paper`.
    - `profile` (none): a file that `shardfold calibrate` wrote; prices are what was measured.
    - `host_pace` (the cluster's own, 1): how many times as long as the default host the one beside
      the GPU takes to ask for kernels; `shardfold calibrate --host` measures it.
    - `memory_limit` (the device's memory less a tenth): per device, in bytes or as `60GiB`.
    - `recompute` (`auto`): activation checkpointing of operators in repeated blocks: as few as
      the memory limit asks for; `never`; `always`, all of them; `attention`, its core, as
      Megatron-LM does it; `products`, all but attention and every second product, as torchtitan
      does it.
    - `micro_batches` (`auto`): gradient accumulation over that many equal parts of the batch: more
      than one only if nothing fits otherwise; `search`, the fastest number if the limit binds; or
      a number.
    - `pipeline` (`auto`): pipeline stages where they take 5% off the step of the best plan without
      (with `prefer` `speed`: anything), or where nothing fits without; `off`; a number of them; or
      how many devices each has, as `1+3`, in the order of the model: looked for with 1F1B alone.
      Stages go with neither pins, a mesh nor `compile`: with these, `auto` looks for none.
    - `prefer` (`simple`): which of the plans whose steps are within half a percent of the best:
      the one with the fewest kinds of splits, then the least memory; `speed`, the fastest; or
      `memory`, the one that needs least.
    - `pins` (none): splits to keep to, as `{"layers.*.mlp.up_proj": "out/8"}` or as texts
      `layers.*.mlp.up_proj=out/8`. The plan says what they cost.
    - `imbalance` (1): of experts that are split, how many times the even share of rows the fullest
      device has; its time, memory and messages are priced so.
    - `fold` (`True`): trace repeated blocks once. Without it each is traced: slower, with the same
      sum of costs, but blocks may then store their parameters in different ways.
    """

    precision: str | None
    dtype: str | None
    compile: bool
    optimizer: str
    mesh: str | Mesh | None
    cost: str
    profile: str | Path | Profile | None
    host_pace: float | None
    memory_limit: float | str | None
    recompute: Recompute
    micro_batches: MicroBatches
    pipeline: Stages
    prefer: Prefer
    pins: Pins
    imbalance: float
    fold: bool


class ProfileUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which profile prices came from: its file as it was given, and the digest of its contents."""

    file: str
    digest: str


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was asked for besides the model and the cluster; `Options` says what each means."""

    precision: str | None = None
    dtype: str | None = None  # of files from before there was a precision
    compile: bool = False
    optimizer: str = "adamw"
    mesh: str | None = None
    cost: str = DEFAULT
    profile: ProfileUse | None = None
    host_pace: Annotated[float, msgspec.Meta(gt=0)] | None = None
    memory_limit: Annotated[float, msgspec.Meta(gt=0)] | None = None
    recompute: Recompute = "auto"
    micro_batches: (
        Annotated[int, msgspec.Meta(ge=1, le=MOST_MICRO_BATCHES)] | Literal["auto", "search"]
    ) = "auto"
    pipeline: (
        Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
        | Annotated[str, msgspec.Meta(pattern=f"^(auto|off|{PARTS})$", max_length=1000)]
    ) = "auto"
    prefer: Prefer = "simple"
    pins: tuple[str, ...] = ()
    imbalance: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    fold: bool = True

    @property
    def numbers(self) -> str | None:
        """The precision by name; None: the model's own dtypes."""
        return self.precision or self.dtype

    @property
    def without_masters(self) -> Request:
        """The same with everything in the dtype that it computes in: a stack says what it adds."""
        name = self.numbers
        plain = name.partition("-")[0] if precision_named(name).master and name else name
        return msgspec.structs.replace(self, precision=plain, dtype=None)

    @property
    def wants_stages(self) -> bool:
        """Whether a number of pipeline stages is asked for."""
        return self.pipeline not in ("auto", "off", 1)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """How many devices each stage is to have, where that is asked for."""
        text = str(self.pipeline)
        return tuple(map(int, text.split("+"))) if "+" in text else ()

    @property
    def may_have_stages(self) -> bool:
        """Whether pipeline stages are looked for."""
        is_free = not self.compile and not self.pins and self.mesh is None
        return self.wants_stages or (self.pipeline == "auto" and is_free)

    def changed(self, options: Options) -> Request:
        """The request with some options given anew, each checked."""
        plain: dict[str, Any] = dict(options)
        for name in plain:
            if name not in Options.__annotations__:
                raise InputError(f"There is no option {name!r}. {_suggested(name)}")
        plain = _with_precision(plain)
        if "memory_limit" in plain and plain["memory_limit"] is not None:
            plain["memory_limit"] = bytes_in(plain["memory_limit"])
        if "pins" in plain:
            plain["pins"] = tuple(map(str, parse_pins(plain["pins"])))
        if plain.get("mesh") is not None:
            plain["mesh"] = str(plain["mesh"])
        if "profile" in plain:
            plain["profile"] = _use_of(plain["profile"])
            plain.setdefault("cost", DEFAULT if self.cost == MEASURED else self.cost)
        found = msgspec.structs.replace(self, **plain)
        if found.profile is not None:
            found = msgspec.structs.replace(found, cost=MEASURED)
        pricing_named(found.cost)
        found.check()
        return found

    def check(self) -> None:
        """Refuse a word that is not known, before any work is done.

        The cost model may be one of the user's own, which is asked for when prices are.
        """
        precision_named(self.numbers)
        if self.compile and self.wants_stages:
            raise InputError(
                "Stages of a pipeline are not compiled yet: compile or pipeline, not both."
            )
        if self.compile and self.micro_batches not in ("auto", 1):
            raise InputError(
                "A compiled module cannot add micro-batches up: leave compile or micro_batches out."
            )
        optimizer_named(self.optimizer)
        if self.host_pace is not None and not 0 < self.host_pace < math.inf:
            raise InputError(f"host_pace must be positive and finite, got {self.host_pace!r}.")
        parse_pins(self.pins)
        for name, known in (("recompute", Recompute), ("prefer", Prefer)):
            word, words = getattr(self, name), get_args(known)
            if word not in words:
                raise InputError(f"Unknown {name} {word!r}. {nearest(str(word), words)}")
        check_micro_batches(self.micro_batches)
        check_stages(self.pipeline)
        if self.wants_stages and (self.pins or self.mesh is not None):
            raise InputError(
                "Stages go with neither pins nor a mesh yet: leave those out, or pipeline=off."
            )
        if not 1 <= self.imbalance < math.inf:
            raise InputError(
                f"The imbalance of experts is at least 1 (the even share of rows), got "
                f"{self.imbalance!r}."
            )

    def profile_for(
        self, given: str | Path | Profile | None, at_hand: str | Path | Profile | None = None
    ) -> Profile | None:
        """The profile of the prices: the one that is given, or the one that was used before.

        That is the one at hand, if it is the same, or the file of that time.
        """
        if given is not None or self.profile is None:
            return None if given is None else _loaded(given)
        use = self.profile
        if at_hand is not None and (known := _loaded(at_hand)).digest == use.digest:
            return known
        try:
            found = load_profile(use.file) if use.file else None
        except ProfileError:
            found = None
        if found is None or found.digest != use.digest:
            what = "is not there" if found is None else "is another one now"
            where = f"{use.file} ({use.digest[:19]})" if use.file else use.digest[:19]
            raise ProfileError(
                f"The prices are by the profile {where}, which {what}: give it as profile=, or on "
                "the command line as --profile."
            )
        return found


def _with_precision(plain: dict[str, Any]) -> dict[str, Any]:
    """The options with one name for the precision, whichever was used."""
    given = [plain[name] for name in ("precision", "dtype") if plain.get(name) is not None]
    if len(given) > 1 and given[0] != given[1]:
        raise InputError(
            f"precision is {given[0]!r} and dtype {given[1]!r}: dtype is the older name of "
            "precision; give one of them."
        )
    if not {"precision", "dtype"} & plain.keys():
        return plain
    return {**plain, "precision": given[0] if given else None, "dtype": None}


def check_micro_batches(wish: object) -> None:
    """Refuse what is no number of micro-batches, and no word for one."""
    words = ("auto", "search")
    if isinstance(wish, str):
        if wish not in words:
            raise InputError(f"Unknown number of micro-batches {wish!r}. {nearest(wish, words)}")
    elif isinstance(wish, bool) or not isinstance(wish, int) or wish < 1:
        raise InputError(f"A step takes 1 micro-batch or more, got {wish!r}.")
    elif wish > MOST_MICRO_BATCHES:
        raise InputError(
            f"A step takes at most {MOST_MICRO_BATCHES:,} micro-batches, got {wish:,}."
        )


def check_stages(wish: object) -> None:
    """Refuse what is no number of pipeline stages, and no word for one."""
    words = ("auto", "off")
    if isinstance(wish, str):
        if wish not in words and not re.fullmatch(PARTS, wish):
            raise InputError(f"Unknown number of stages {wish!r}. {nearest(wish, words)}")
    elif isinstance(wish, bool) or not isinstance(wish, int) or wish < 1:
        raise InputError(f"A pipeline has 1 stage or more, got {wish!r}.")


def bytes_in(size: float | str) -> float:
    """A size as the user writes it: a number of bytes, or a text.

    >>> bytes_in(1500), bytes_in("1500"), bytes_in("64MiB"), bytes_in("2.5G")
    (1500.0, 1500.0, 67108864.0, 2684354560.0)
    """
    unit = ""
    try:
        if isinstance(size, str):
            spelled = size.strip().upper().removesuffix("IB").removesuffix("B")
            unit = spelled[-1:] if spelled[-1:] in "KMGT" else ""
            found = float(spelled.removesuffix(unit)) * UNITS[unit]
        else:
            found = float(size)
    except (TypeError, ValueError) as error:
        raise InputError(f"{size!r} is not a size; write 1500, 64MiB or 2.5G.") from error
    if not 0 < found < math.inf:
        raise InputError(f"A size must be positive and finite, got {size!r}.")
    return found


def _suggested(name: str) -> str:
    new = RENAMED.get(name)
    return f"It is called {new} now." if new else nearest(name, Options.__annotations__)


def _loaded(profile: str | Path | Profile) -> Profile:
    return profile if isinstance(profile, Profile) else load_profile(profile)


def _use_of(profile: str | Path | Profile | None) -> ProfileUse | None:
    if profile is None:
        return None
    file = "" if isinstance(profile, Profile) else str(profile)
    return ProfileUse(file, _loaded(profile).digest)
