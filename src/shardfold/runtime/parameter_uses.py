"""The uses of a rank's parameters: what each reader is given, and where its gradient goes.

Every use is a leaf of autograd, beside the DTensor that the user sees and on the same memory. So
nothing of DTensor runs between forward and backward, and a gradient is caught where it appears.
When backward ends, the reduced gradients of all uses are added to the parameter's `grad`; in a step
of several passes, when the last one ends.

Where a plan sums the gradients of several uses up before it reduces them (a tied weight), what
comes is added up here, and the sum goes on as the gradient of the use that backward meets last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfold.errors import RunError
from shardfold.runtime.gradient_reducer import Launched, Reducer, Reduction, is_free, owned
from shardfold.runtime.lower import Feed, Lowered
from shardfold.runtime.ops import Context
from shardfold.runtime.parameter_gather import Gather, Gathered, Joint, Member, Promise, joints_of
from shardfold.runtime.parameters import Keeping
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.reshard import Woven, perform


@dataclass(frozen=True, slots=True)
class Use:
    """One operand that is a parameter with a gradient: which instruction's, and its edge."""

    number: int
    instruction: int
    operand: int
    feed: Feed
    is_new: bool = False  # its gradient is made by the reader's backward, and nobody else's
    stretch: int = 0  # what runs again together: 0 for what does not

    @property
    def has_gradient(self) -> bool:
        """Whether one comes back from the reader."""
        return self.feed.back is not None


@dataclass(slots=True)
class Sum:
    """The gradients of one parameter's uses, added up until all have come."""

    wanted: int
    count: int = 0
    total: Tensor | None = None

    def add(self, gradient: Tensor) -> bool:
        """Take one of them; whether it is the last."""
        if self.total is None:
            self.total = gradient
        else:
            is_own = is_free(self.total)
            self.total = self.total.add_(gradient) if is_own else self.total + gradient
        self.count += 1
        return self.count == self.wanted

    def take(self) -> Tensor:
        """The sum, and begin anew."""
        total, self.total, self.count = self.total, None, 0
        return total


def uses_of(lowered: Lowered, parameters: Mapping[int, Any]) -> list[Use]:
    """Every use of the parameters, in the order of execution."""
    found: list[Use] = []
    again = {op: number for number, r in enumerate(lowered.again, 1) for op in r.ops}
    for index, instruction in enumerate(lowered.instructions):
        for operand, feed in enumerate(instruction.feeds):
            if feed.tensor in parameters and feed.requires_grad:
                stretch = again.get(index, 0)
                site = instruction.site
                new = site.rule.rule.operator.makes_gradients
                is_new = site.op.operands[operand].name in new
                found.append(Use(len(found), index, operand, feed, is_new, stretch))
    return found


class Differentiable(torch.autograd.Function):
    """The loss with the parameters as inputs, as `torch.autograd.grad` needs it.

    That (and `backward(inputs=...)`) walks only what leads to the tensors it is given. The leaves
    of the uses are none of them, so it would find nothing; then the whole of backward runs from
    here, and what it leaves in `grad` is handed over instead.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        """The loss as it is."""
        ctx.loss, ctx.parameters = loss, parameters
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """On to the loss; or the gradients of the parameters, where nothing else is asked for."""
        if isinstance(gradient, DTensor):  # of a loss to which a norm of parameters was added
            gradient = gradient.full_tensor()
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True asks for gradients of gradients, which a plan does not have: "
                "a penalty on gradients must be part of the model that is planned."
            )
        if torch._C._will_engine_execute_node(ctx.loss.grad_fn):
            return gradient, *[None] * len(ctx.parameters)
        before = [parameter.grad for parameter in ctx.parameters]
        try:
            for parameter in ctx.parameters:
                parameter.grad = None
            keeps = torch._C._autograd._get_current_graph_task_keep_graph()
            torch.autograd.backward(ctx.loss, gradient, retain_graph=keeps)
            return None, *[parameter.grad for parameter in ctx.parameters]
        finally:
            for parameter, grad in zip(ctx.parameters, before, strict=True):
                parameter.grad = grad


def differentiable(loss: Tensor, parameters: Iterable[Any]) -> Tensor:
    """The loss, for `torch.autograd.grad` with respect to the parameters, too.

    Where hooks wait for a gradient it stays as it is: autograd would call them once more.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if loss.grad_fn is None or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in trained
    ):
        return loss
    found: Tensor = Differentiable.apply(loss, *trained)
    return found


class Uses:
    """The leaves of all uses, kept for as long as the parameters stay where they are."""

    def __init__(
        self,
        uses: Sequence[Use],
        keepings: Mapping[int, Keeping],
        groups: Groups,
        levels: Sequence[int],
    ) -> None:
        self.uses, self.keepings, self.levels = uses, keepings, levels
        self.groups = groups.background()
        self.gathers = {
            use.number: Gather(use.feed.there, self.groups, levels, use.feed.cast)
            for use in uses
            if use.feed.there or use.feed.cast
        }
        self.joints: dict[int, Joint] = {}  # of each use that is gathered
        self.joined: list[Launched] = []  # gathers of this step that several uses share
        self.parameters: dict[int, Any] = {}
        self.parts: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.found: dict[int, Tensor] = {}  # gradients of this backward, by parameter
        self.last = {u.feed.tensor: u for u in uses if u.feed.onward is not None}
        self.sums = {t: Sum(number) for t, number in self._summed_here()}
        self.reducer: Reducer | None = None
        self.turn = (0, 1)  # the number of this pass, and how many a step takes
        self.is_held = False  # gradients wait for `settle`: other stages have a part in them

    def _summed_here(self) -> Iterator[tuple[int, int]]:
        """Parameters whose gradients only wait for one another, and how many come."""
        for tensor in self.last:
            uses = [use for use in self.uses if use.feed.tensor == tensor]
            if not any(use.feed.back for use in uses):
                yield tensor, sum(use.has_gradient for use in uses)

    def bind(self, parameters: Mapping[int, Any]) -> list[Tensor]:
        """The leaf of every use, for these parameters, and be ready for their gradients."""
        found = self.leaves_for(parameters)
        self.begin()
        return found

    def leaves_for(self, parameters: Mapping[int, Any]) -> list[Tensor]:
        """The leaf of every use; the same ones as before where the parameters are."""
        same = self.reducer is not None
        for tensor, parameter in parameters.items():
            part = parameter._local_tensor
            if self.parts.get(tensor) is not part or self.parameters.get(tensor) is not parameter:
                self.parts[tensor], self.parameters[tensor] = part, parameter
                same = False
        if not same:
            self._make()
        assert self.reducer is not None
        for use, leaf in zip(self.uses, self.leaves, strict=True):
            wanted = self.parameters[use.feed.tensor].requires_grad
            if leaf.requires_grad != wanted:
                leaf.requires_grad_(wanted)
        return self.leaves

    def begin(self) -> None:
        """Be ready for the backward of this turn."""
        assert self.reducer is not None
        self.reducer.begin(*self.turn)
        if self.reducer.is_first:
            self.found.clear()
            if not self.is_held:
                self.joined.clear()
        for summed in self.sums.values():
            summed.take()

    def _make(self) -> None:
        self.leaves = []
        for use in self.uses:
            leaf = self.parts[use.feed.tensor].detach().requires_grad_()
            if use.number not in self.gathers:
                # A tensor's hook that leads back to the tensor would keep it for ever.
                taken = partial(_taken, weakref.ref(self), use.number)
                leaf.register_post_accumulate_grad_hook(taken)
            self.leaves.append(leaf)
        members = [
            Member(number, gather, self.leaves[number], self.uses[number].stretch)
            for number, gather in self.gathers.items()
        ]
        found = joints_of(members, self.joined)
        self.joints = {number: joint for joint in found for number in joint.members}
        self.reducer = Reducer(
            [self._reduction(use) for use in self.uses if use.has_gradient],
            self.groups,
            self._deliver,
            self._settle,
            rest=self._rest,
        )

    def _reduction(self, use: Use) -> Reduction:
        moves = use.feed.back
        if use.feed.onward is not None and use.feed.tensor in self.sums:
            moves = use.feed.onward
        assert moves is not None
        dtype, cast = self.parts[use.feed.tensor].dtype, use.feed.cast
        dtype = dtype if cast is None or dtype != cast.kept else cast.sent
        items = torch.Size(moves.source).numel()
        axes = moves.at_once("reduce_scatter", self.levels)
        woven = None
        if axes is not None and moves.is_even:
            woven = Woven.of(moves, axes, self.groups.place)
        return Reduction(use.number, moves, dtype, items * dtype.itemsize, woven, cast)

    def _arrived(self, number: int, gradient: Tensor) -> None:
        assert self.reducer is not None
        tensor = self.uses[number].feed.tensor
        summed = self.sums.get(tensor)
        if summed is None:
            self.reducer.arrived(number, gradient)
            return
        self.reducer.activate()
        if summed.add(gradient):
            self.reducer.arrived(self.last[tensor].number, summed.take())

    def _rest(self) -> None:
        """Hand over sums for which not all have come: some use has no part in this loss."""
        assert self.reducer is not None
        for tensor, summed in self.sums.items():
            if summed.count:
                self.reducer.arrived(self.last[tensor].number, summed.take())

    def start(self, number: int) -> None:
        """Begin to gather the parameter of a use, if it is the first of those that go together."""
        joint = self.joints[number]
        if joint.first == number:
            joint.start_ahead()

    def gathered(self, number: int, leaf: Tensor) -> Tensor:
        """The parameter of a use as its reader needs it."""
        take = partial(self.joints[number].collect_ahead, number)
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return take()
        found: Tensor = Gathered.apply(leaf, take, partial(self._handed_over, number))
        return found

    def _handed_over(self, number: int, gradient: Tensor) -> None:
        """Take what autograd had for a gathered parameter."""
        use = self.uses[number]
        own = gradient if use.feed.cast is None else use.feed.cast.to_send(gradient)
        if own is gradient and not use.is_new:
            own = gradient.clone(memory_format=torch.contiguous_format)
        self._arrived(number, own)

    def promise(self, number: int, context: Context) -> Promise:
        """What is kept in this step of the parameter of a use, and of those that go with it."""
        joint = self.joints[number]
        found: Promise | None = context.promises.get(joint.first)
        if found is None:
            found = context.promises[joint.first] = Promise(joint, context)
        return found

    def trains(self, tensor: int) -> bool:
        """Whether a gradient comes for a parameter."""
        is_read = any(use.feed.tensor == tensor and use.has_gradient for use in self.uses)
        return is_read and self.parameters[tensor].requires_grad

    def nothing(self, tensor: int) -> Tensor:
        """A gradient of zeros, as those of a parameter's uses come."""
        moves = next(u.feed.back for u in self.uses if u.feed.tensor == tensor and u.feed.back)
        return self.parts[tensor].new_zeros(moves.target)

    @property
    def launched(self) -> list[Launched]:
        """The collectives of the latest step that stand for several of the plan's."""
        return [*self.joined, *(self.reducer.launched if self.reducer is not None else ())]

    def _deliver(self, number: int, gradient: Tensor) -> None:
        """Add up what comes for the uses of a parameter."""
        tensor, cast = self.uses[number].feed.tensor, self.uses[number].feed.cast
        gradient = gradient if cast is None else cast.to_keep(gradient)
        found = self.found.get(tensor)
        if found is None and self.turn[1] > 1 and not is_free(gradient):
            gradient = gradient.clone()  # it is kept for longer than its bucket
        self.found[tensor] = gradient if found is None else found.add_(gradient)

    def _settle(self) -> None:
        if not self.is_held:
            self.settle()

    def settle(self) -> None:
        """Give every parameter its gradient, and call what the user wants called then."""
        for tensor, gradient in self.found.items():
            parameter = self.parameters[tensor]
            if tensor in self.last and tensor not in self.sums:
                onward = self.last[tensor].feed.onward
                assert onward is not None
                cast = self.last[tensor].feed.cast
                sent = gradient if cast is None else cast.to_send(gradient)
                gradient = perform(onward, sent, self.groups)
                gradient = gradient if cast is None else cast.to_keep(gradient)
            own = gradient.reshape(self.keepings[tensor].stored.extent.shape)
            for hook in (parameter._backward_hooks or {}).values():
                changed = hook(self._wrapped(parameter, own))
                own = own if changed is None else owned(changed.to_local())
            if parameter.grad is None:
                parameter.grad = self._wrapped(parameter, own)
            else:
                if parameter.grad.placements != parameter.placements:  # of what a user added
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                parameter.grad._local_tensor.add_(own)
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        self.found.clear()

    def _wrapped(self, parameter: Any, own: Tensor) -> Tensor:
        found: Tensor = DTensor(own.contiguous(), parameter._spec, requires_grad=False)
        return found


def _taken(owner: weakref.ref[Uses], number: int, leaf: Tensor) -> None:
    """Take the gradient of a leaf from it."""
    uses = owner()
    if uses is None:
        raise RunError("The module that this loss is of is gone: keep it until backward is done.")
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    uses._arrived(number, gradient)
