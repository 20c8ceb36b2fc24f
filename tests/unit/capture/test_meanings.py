"""What forward does is right under a plan, or refused by name: never silently otherwise.

The oracle is the module itself in plain PyTorch, float64: loss, gradients, buffers and parameters
after each of two or three forward and backward passes.
"""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardfold.capture import capture_program
from shardfold.errors import ShardfoldError
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.runtime.reference import Reference
from shardfold.sharding import find_subdims

from . import meanings

CASES = {
    name: case
    for name, case in vars(meanings).items()
    if isinstance(case, type) and issubclass(case, nn.Module) and hasattr(case, "steps")
    if name != "Case"
}
DRAWS = (  # other numbers than plain PyTorch would
    *("Noise", "Choices", "ComplexWeights", "DroppedBetweenLayers", "RandomSlopes"),
)
# What each that is refused is told: the reason, and where.
REFUSED = {
    "DirtyFunction": r"meanings.py:\d+\) calls torch.autograd.Function Dirty, which writes into",
    "TensorHook": r"meanings.py:\d+\) registers a hook on a gradient",
    "HookOnlyLooks": r"meanings.py:\d+\) registers a hook on a gradient",
    "BackwardHook": r"module 'a' \(Linear\) has a backward hook",
    "BackwardPreHook": r"module 'a' \(Linear\) has a backward pre-hook",
    "ParameterHook": r"The parameter a.weight has a hook on its gradient",
    "AccumulateHook": r"The parameter a.weight has a hook on its gradient",
    "HookThatCounts": r"attribute 'calls' of module 'a' in every call \(from 0 to 1\)",
    "ClampedWeight": r"changes the parameter b.weight inside forward",
    "DataOfAWeight": r"changes the parameter b.weight inside forward",
    "ScaledDataOfAWeight": r"changes the parameter b.weight inside forward",
    "GrownBuffer": r"replaces 'rows' of the model by a .* of shape \(2, 6\)",
    "RenormedEmbedding": r"changes the parameter embedding.weight .* leave max_norm out",
    "SparseEmbedding": r"gives sparse gradients: use sparse=False",
    "CumulativeNorm": r"module 'norm' \(BatchNorm1d\) .*momentum=None",
    "Scaled": r"The argument beta is 0.5, the plan was made with 1.0",
    "Flagged": r"The argument 2 is True, the plan was made with False",
    "Nested": r"The argument 0.weights.0 is 3.0, the plan was made with 2.0",
    "Maybe": r"The argument mask is a Tensor, the plan was made with None",
    "Counter": r"attribute 'calls' of the model in every call \(from 0 to 1\)",
    "EveryOther": r"attribute 'state' .* \(from {'calls': 0} to {'calls': 1}\)",
    "History": r"attribute 'history' .* \(from \[\] to \[4\]\)",
    "CounterInABlock": r"attribute 'calls' of module 'blocks.0'",
    "PythonsRandom": r"draws from Python's random",
    "ListOfLosses": r"returns 2 scalars with a gradient",
    "DictOfLosses": r"returns 2 scalars with a gradient",
    "Autocast": r"runs under torch.autocast\('cpu', torch.bfloat16\)",
    "AutocastElsewhere": r"meanings.py:\d+\) runs under torch.autocast\('cuda', torch.float16\)",
    "WrittenWithoutGradients": r"writes, without autograd, into a tensor that has a gradient",
    "InputWritten": r"writes into the input x .*meanings.py:\d+",
    "FrozenInForward": r"meanings.py:\d+\) sets requires_grad to False inside forward",
    "BackwardInForward": r"meanings.py:\d+\) runs a backward pass inside forward",
    "LayerDropByNumberOn": r"tosses a coin and branches on it \(LayerDrop",
    "LoggedNumbers": r"meanings.py:\d+\) takes a number out of a tensor, as a Python float",
    "FunctionGiven": r"The argument 1 is a builtin_function_or_method, which cannot be captured",
    "ArrayGiven": r"The argument w is a ndarray.* give it as a tensor \(torch.from_numpy\)",
    "OwnTrainingMode": r"'norm' \(BatchNorm1d\) is not in the mode .* Call train\(\) on the model",
    "PassedOverMean": r"meanings.py:\d+\) reduces what its mask selects in a part",
    "PassedOverCount": r"changes a number of Python's in a part that is passed over",
    "PassedOverByAnother": r"meanings.py:\d+\) writes to a tensor, but not where its mask",
    "PassedOverBatch": r"meanings.py:\d+\) writes to a tensor, but not where its mask",
    "PassedOverList": r"meanings.py:\d+\) failed .*\n.*branch or a shape depends on",
    "PassedOverResult": r"reads a tensor that was made in a part that is passed over",
    "PassedOverOtherwise": r"meanings.py:\d+\) failed .*\n.*branch or a shape depends on",
    "TurnsCounted": r"meanings.py:\d+\) goes over the places that a mask selects, whose number",
    "TurnsWithoutPlaces": r"meanings.py:\d+\) writes to a tensor, but not where its mask",
    "TurnsAfterEachOther": r"reads a tensor that was made in a part that is passed over",
    "BufferMadeInForward": r"makes the buffer 'places' of the model, .* Call the model once before",
    "ParameterMadeInForward": r"makes the parameter 'scale' .* Call the model once before",
    "PartMadeInForward": r"makes the LayerNorm 'norm', which is not .* Call the model once before",
    "PlacesCounted": r"meanings.py:\d+\) failed .*\n.*branch or a shape depends on the values",
    "PlacesSqueezed": r"aten.* a size or a number that depends on the values",
    "PlacesOfAnother": r"aten.* a size or a number that depends on the values",
    "DetachedInPlace": r"detach_ .* writes, without autograd",
    "FunctionWithModule": r"gives torch.autograd.Function ByModule Linear",
    "FunctionAroundModule": r"calls .*Around, which reads a Linear from around it",
    "KeptFunctionCounts": r"Counting, which changes 'calls' in every call",
    "KeptFunctionAndGradient": r"Function Round by another name, and asks for gradients itself",
    "TupleOfLosses": r"returns 2 scalars with a gradient",
    "NestedLosses": r"returns 2 scalars with a gradient",
    "LayerDropOn": r"tosses a coin and branches on it \(LayerDrop",
    "CachedBatch": r"'first' of the model in its first call, and computes something else",
    "CachedWeights": r"'first' of the model in its first call, and computes something else",
    "CachedStatistics": r"'first' of the model in its first call, and computes something else",
    "CachedNoise": r"'first' of the model in its first call, and computes something else",
    "FirstCallOnly": r"'is_new' of the model in its first call, .* \(from True to False\)",
    "TurningValues": r"attribute 'factors' of the model in every call \(a cycle\)",
    "RandomOfItsOwn": r"attribute 'numbers' of the model in every call \(a Generator\)",
    "CountedInAnArray": r"attribute 'calls' of the model in every call \(a ndarray\)",
    "CountedByAnObject": r"attribute 'warming' of the model in every call \(a Warming\)",
    "CountedInAHelper": r"attribute '.*meanings.CALLS' of CountedInAHelper in every call",
    "CountedInADefault": r"attribute '.*between.default 0' of .* \(from \[\] to \[1\]\)",
    "CountedAround": r"attribute '.*between.calls' of CountedAround in every call \(from 0 to 1\)",
    "GlobalCounter": r"attribute 'calls' of GlobalCounter in every call \(from 0 to 1\)",
    "ParameterCopiedInto": r"changes the parameter b.bias inside forward",
    "BranchOnAValue": r"meanings.py:\d+\) failed .*\n.*branch or a shape depends on the values",
    "ModuleToAnotherDtype": r"meanings.py:\d+\) converts the parameters of a module in forward",
    "PlainTensorWritten": r"meanings.py:\d+\) writes into a tensor that is neither",
    "PlainTensorReplaced": r"Forward reads 'more' of the model, .* and leaves another there",
    "CtcLossOfWhatWasSelected": r"aten.index.* a size or a number that depends on the values",
    "PackedSequence": r"meanings.py:\d+\) packs sequences .* depends on the values of lengths",
    "FlexAttention": r"meanings.py:\d+\) calls flex_attention",
    "Vmapped": r"Forward uses torch.vmap .* a transformation of functions",
    "AutocastOfAPart": r"calls AutocastOfAPart.between, decorated by torch.autocast\(.cuda.\)",
    "ReplacedByAnotherShape": r"replaces 'last' of module 'part' by a .* of shape \(8, 6\)",
    "ParameterReplaced": r"replaces 'bias' of module 'b' by a .* of shape \(6,\)",
    "FunctionDraws": r"meanings.py:\d+\) calls .* RandomFunction, which draws random numbers",
    "FunctionDrawsInBackward": r"NoisyBackward.* gives something else when it is called again",
    "FunctionCounts": r"meanings.py:\d+\) calls .* Counting, which changes 'calls' in every call",
    "OperatorDraws": r"meanings.noise.* gives something else when it is called again",
    "HookOnANode": r"meanings.py:\d+\) registers a hook on a gradient",
    "HooksOnSavedTensors": r"meanings.py:\d+\) puts hooks on the tensors that are saved",
    "ViewOfABuffer": r"all and row of the model are two tensors in one memory",
    "ParametersInOneMemory": r"rows and a.weight of the model are two tensors in one memory",
    "NormUnderACheckpoint": r"meanings.py:\d+\) changes a buffer inside torch.utils.checkpoint",
    "BufferUnderACheckpoint": r"meanings.py:\d+\) changes a buffer inside torch.utils.checkpoint",
    "TeacherSharesMemory": r"meanings.py:\d+\) replaces a tensor's memory",
    "BuffersChangePlaces": r"replaces 'p' of the model by a .* of shape \(6,\)",
    "FirstBuffer": r"replaces 'p' of the model by a .* of shape \(6,\)",
    "TruncatedNormal": r"meanings.py:\d+\) draws random numbers by trial and error",
    "MaskMadeOfAnother": r"meanings.py:\d+\) failed .*\n.*branch or a shape depends on the values",
    "MaskOfALaterDimOtherwise": r"aten.index.* a size or a number that depends on the values",
    "PutElsewhere": r"aten.index.* a size or a number that depends on the values",
    "SelectedIsWrittenUnseen": r"aten.index.* a size or a number that depends on the values",
    "SelectedIsSorted": r"aten.index.* a size or a number that depends on the values",
    "OwnGenerator": r"meanings.py:\d+\) draws random numbers from a torch.Generator of its own",
    "Seeds": r"meanings.py:\d+\) seeds torch's random numbers",
    "ParameterOfNobody": r"meanings.py:\d+\) reads a parameter that is not the model's",
    "Lazy": r"module 'c' \(LazyLinear\) has parameters without a shape",
    "ScriptedAttribute": r"The part \(model\) \(ScriptedAttribute\) is, or holds, what torch.jit",
    "WrittenConstants": r"a size or a number that depends on the values",
    "OtherBits": r"aten.view.* takes the bits of numbers for those of another dtype",
}


def as_case(tree: Any, case: Any) -> Any:
    """Copies of a batch, in the case's dtype."""

    def copied(t: Tensor) -> Tensor:
        return t.to(dtype_of(case), copy=True) if t.is_floating_point() else t.clone()

    return pytree.tree_map_only(Tensor, copied, tree)


def dtype_of(case: Any) -> torch.dtype:
    found: torch.dtype = getattr(case, "dtype", torch.float64)
    return found


def built(name: str) -> Any:
    case, dtype = CASES[name](), dtype_of(CASES[name])
    return case if dtype == torch.float32 else case.to(dtype)  # complex ones would become real


def loss_of(case: Any, output: Any) -> Tensor:
    found: Tensor = case.loss(output) if hasattr(case, "loss") else output
    return found


def trained(module: nn.Module, case: Any, steps: Any) -> list[dict[str, Tensor]]:
    """What is there after each step: the loss, gradients, buffers, parameters."""
    found = []
    for args, kwargs in steps:
        module.zero_grad()
        args, kwargs = as_case((args, kwargs), case)
        output = module(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else loss_of(case, output)
        loss.backward()
        state = {"loss": loss.detach()}
        for key, parameter in module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                state[f"gradient of {key}"] = grad.to_dense() if grad.is_sparse else grad.clone()
            state[key] = parameter.detach().clone()
        state |= {key: buffer.clone() for key, buffer in module.named_buffers()}
        found.append(state)
    return found


def assembled(name: str) -> Any:
    """The captured program of a case, on one device."""
    case = built(name)
    args, kwargs = as_case(case.steps()[0], case)
    program = capture_program(case, args, kwargs)
    subdims = find_subdims(program.graph, rules_of(program.graph))
    is_wide = dtype_of(case) == torch.float64 or name in DRAWS
    return assemble(case, program, alone(program, subdims), Settings(float64=is_wide))


def captured(name: str) -> list[dict[str, Tensor]]:
    case = built(name)
    return trained(assembled(name), case, case.steps())


def differences(name: str) -> list[str]:
    case = built(name)
    expected = trained(case, case, case.steps())
    found = captured(name)
    return [
        f"step {number}: {key}"
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for key in theirs
        if key not in ours or not torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12)
    ]


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*REFUSED, *DRAWS)])
def test_a_meaning_is_kept(name: str) -> None:
    torch.manual_seed(2)
    assert differences(name) == []


@pytest.mark.parametrize("name", DRAWS)
def test_the_module_with_the_numbers_that_were_drawn(name: str) -> None:
    case, module = built(name), assembled(name)
    reference = Reference(case, None)
    for step in case.steps():
        args, kwargs = as_case(step, case)
        drawn = module._run.context.drawn = []
        module.zero_grad()
        loss = module(*args, **kwargs)
        module._run.context.drawn = None
        loss.backward()
        wanted = reference.step([(args, kwargs)], drawn)
        assert abs(float(loss.detach()) - wanted.loss) < 1e-12 * abs(wanted.loss)
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted.gradients[key])


@pytest.mark.parametrize("name", ["Thresholded", "CtcLoss"])
def test_a_function_of_which_draws_show_nothing_is_never_split(name: str) -> None:
    case = built(name)
    args, kwargs = as_case(case.steps()[0], case)
    graph = capture_program(case, args, kwargs).graph
    found = [op for op in graph.ops if op.kind == "shardfold.function"]
    assert found
    assert all(op.splits is None for op in found)


def test_classes_of_users_hear_of_no_class_that_is_derived_from_theirs() -> None:
    before = dict(meanings.Registered.known)
    module = assembled("RegisteredBlocks")
    assert isinstance(module.blocks[0], meanings.Half)
    assert meanings.Registered.known == before


CELL = """
class Checked(Case):
    def between(self, h):
        assert torch.isfinite(h).all(), "not finite"
        if h.isnan().any():
            raise ValueError("not a number")
        return h + torch.normal(0.0, 0.1, (1, 6))
"""


def test_checks_of_values_in_a_notebooks_cell_are_taken_to_pass() -> None:
    linecache.cache["<cell 1>"] = (len(CELL), None, CELL.splitlines(True), "<cell 1>")
    known = {**vars(meanings)}
    exec(compile(CELL, "<cell 1>", "exec"), known)
    case = known["Checked"]()
    graph = capture_program(case, *case.steps()[0]).graph
    assert [note for note in graph.notes if "<cell 1>:4 is taken to pass" in note]
    assert "aten.normal" in {op.kind for op in graph.ops}


@pytest.mark.parametrize("name", REFUSED)
def test_a_meaning_that_cannot_be_kept_is_refused_by_name(name: str) -> None:
    with pytest.raises(ShardfoldError, match=REFUSED[name]):
        captured(name)
