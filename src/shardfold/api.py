"""From a module and a cluster to the best plan, and questions about it.

`Planner._plan` is the way of a plan on one screen: captured, chosen, described. A `Planner` holds
a model with an example batch, captures it when that is first needed, and answers with what it
captured. The functions below it are one-liners over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from shardfold.cluster import Cluster, from_plain, mesh_from_text, parse
from shardfold.cluster.cluster import resized
from shardfold.costs import Pricing, Profile, assumed, measured_by, optimizer_named, pricing_named
from shardfold.costs.accuracy import spread_of
from shardfold.errors import ClusterError, InfeasibleError, InputError
from shardfold.explanation.explain import case_of, price_elsewhere
from shardfold.explanation.explain import explain as explain_case
from shardfold.explanation.explanation import Explanation, Kept, WhatIf
from shardfold.export.projection import Projection, project
from shardfold.export.search import Prices
from shardfold.export.stack_plan import (
    StackPlan,
    beside,
    best_for,
    choices_of,
    job_of,
    sizes_of,
)
from shardfold.export.targets import Sizes, Target, target_named
from shardfold.export.writers import Job
from shardfold.graph import Graph
from shardfold.graph.precision import precision_named
from shardfold.operators import Rules, rules_of
from shardfold.operators.experts import imbalanced
from shardfold.pipeline.cut import Layers, leaves_out_layers
from shardfold.planner.batch_search import Tried, best, largest
from shardfold.planner.batch_slices import items_of, mapped, scaled
from shardfold.planner.case import ResolvedRequest
from shardfold.planner.compare_methods import (
    METHODS,
    Comparison,
    Effort,
    Methods,
    check_methods,
)
from shardfold.planner.estimate import check_overlap
from shardfold.planner.estimate import estimate as estimate_stated
from shardfold.planner.estimated import Estimated
from shardfold.planner.micro_batches import Captures, check_number
from shardfold.planner.options import Options, Request
from shardfold.planner.scaling import ScaleRow, Scaling
from shardfold.planner.with_stages import Question, best_of_equal_layers, choose, without_stages
from shardfold.plans import Plan, check
from shardfold.plans.batch import example_for
from shardfold.plans.build import describe
from shardfold.plans.plan import MOST_AXES
from shardfold.progress import Stage, Watch, ignore, without_gc
from shardfold.search.problem import write_problem
from shardfold.sharding import Subdims, find_subdims
from shardfold.strategies.pins import parse_pins
from shardfold.strategies.stacks import OWN, stack_named
from shardfold.strategies.stated import Stated, parse_strategy

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question: as a plan keeps it, and with everything found that it names."""

    request: Request
    search: ResolvedRequest
    notes: set[str]  # what pricing had to assume, as it is met


class Planner:
    """A model with an example batch and a cluster: captured once, for many questions.

    `args` and `kwargs` are a batch as `model` takes it; nothing is run and no weight is allocated.
    `cluster` is a name such as `4x8xh100`, a path to a cluster file, or a `Cluster`. `loss` turns
    the model's output into a scalar where the model does not. `rules` adds rules for operators that
    shardfold does not know. `watch` is called with the progress. The options are those of
    `Options`: those given here hold for every method, and each method may change some.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        cluster: str | Cluster | None = None,
        loss: Callable[[Any], Any] | None = None,
        rules: Rules | None = None,
        watch: Watch = ignore,
        **options: Unpack[Options],
    ) -> None:
        self.model, self.args, self.kwargs = model, tuple(args), dict(kwargs or {})
        self.loss, self.rules, self.watch = loss, dict(rules or {}), watch
        self.cluster = parse(cluster) if isinstance(cluster, str) else cluster
        self.options = options
        self._captures: dict[tuple[str | None, bool, bool, str, bool], Captures] = {}
        self._graphs: dict[object, Graph] = {}
        Request().changed(options)  # what is cheap to check is checked before the work begins

    @without_gc()
    def plan(
        self,
        *,
        cluster: str | Cluster | None = None,
        save_problem: str | Path | None = None,
        **options: Unpack[Options],
    ) -> Plan:
        """Find the fastest way to train the model on the cluster that fits in its memory.

        `save_problem` writes a search problem to a file, for `shardfold solve`: that of the mesh
        that is best without stages.
        """
        asked = self._asked(Request(), cluster, {**self.options, **options})
        return self._plan(asked, save_problem)

    @without_gc()
    def compare(
        self,
        *,
        cluster: str | Cluster | None = None,
        methods: Sequence[str] = METHODS,
        effort: Effort | None = None,
        save_plans: str | Path | None = None,
        **options: Unpack[Options],
    ) -> Comparison:
        """Compare the plan with baselines and other searches.

        `methods` are names of `METHODS`; `effort` bounds what the other searches may spend. Methods
        are compared by their simulated steps: the plan's is no longer than that of any baseline
        that fits in memory, unless pins make it so, or, by up to 0.5%, a preference other than
        speed. `selected` is what `plan` returns, `additive-optimum` the optimum of the additive
        cost. `save_plans` is a folder that gets a plan of every method that has one.
        """
        check_methods(methods)
        asked = self._asked(Request(), cluster, {**self.options, **options})
        question = self._question(asked, is_short=False)
        captures = question.captures
        chosen = choose(question)
        tried = Methods(
            chosen.selection,
            effort or Effort(),
            chosen.pipelines.plan,
            partial(best_of_equal_layers, question),
        )
        results = tried.results(methods, self._progress("comparing"))
        request = asked.request
        found = Comparison(
            cluster=asked.search.cluster.name,
            cost=request.cost,
            optimizer=request.optimizer,
            dtype=request.numbers or "as in the model",
            limit_bytes=chosen.selection.limit_bytes,
            operators=len(chosen.selection.additive.case.graph.ops),
            tables_seconds=chosen.seconds,
            results=results,
        )
        if save_plans is not None:
            self._progress("describe")(0, 1)
            folder = Path(save_plans)
            folder.mkdir(parents=True, exist_ok=True)
            for name in (r.method for r in results if r.step_seconds is not None):
                one, stages = tried.found_by(name)
                passes = one.winner.case.tables.micro_batches
                plan = describe(
                    one,
                    request=request,
                    capture_seconds=captures.seconds,
                    search_seconds=chosen.seconds,
                    model=type(self.model).__name__,
                    cuts=captures.cuts(stages.plan.micro_batches if stages.plan else passes),
                    pipelines=stages,
                )
                plan.with_notes(f"Chosen by {name}.").save(folder / f"{name}.json")
        return found

    @without_gc()
    def estimate(
        self,
        strategy: str,
        *,
        cluster: str | Cluster | None = None,
        stack: str = OWN.name,
        beside_plan: bool = True,
        **options: Unpack[Options],
    ) -> Estimated:
        """Price a strategy that is stated, such as `fsdp=32 tp=8 sp recompute=full`.

        The words are those of `shardfold.strategies.stated`. `stack` is the training stack that
        runs it, a name of `shardfold.strategies.stacks`: it says what is kept in float32 and what
        overlaps. With `beside_plan` the best plan is found, too, and its figures are beside;
        options of recomputation, micro-batches, stages, mesh and pins are for that plan, as the
        strategy states its own.
        """
        asked = self._asked(Request(), cluster, {**self.options, **options})
        stated = parse_strategy(strategy, asked.search.cluster.size)
        runs = stack_named(stack)
        if _reduces_half(asked):
            runs = runs.reducing_half()
        graph = self._stated_graph(asked if runs is OWN else _without_masters(asked), stated)
        self._progress("estimating")(0, 1)
        found = _ranged(estimate_stated(graph, asked.search, stated, runs), asked, stated.stages)
        if not beside_plan:
            return found
        plan = choose(self._question(asked))
        if not plan.fits:
            return found
        return replace(found, plan_seconds=plan.best.seconds, plan_bytes=plan.best.peak_bytes)

    @without_gc()
    def plan_for(
        self,
        stack: str,
        *,
        cluster: str | Cluster | None = None,
        beside_plan: bool = True,
        **options: Unpack[Options],
    ) -> StackPlan:
        """The best configuration of a training stack, with its own file or arguments.

        `stack` is a name of `shardfold.export.targets`, such as `torchtitan`, `megatron@0.16` or
        `accelerate`. Only configurations of that stack are searched, and priced as it runs them;
        the result states its strategy in the words of `estimate`. With `beside_plan` shardfold's
        own plan is found, too.
        """
        target, version = target_named(stack)
        asked = self._asked(Request(), cluster, {**self.options, **options})
        wish = asked.request.micro_batches
        prices, job, sizes = self._priced_for(asked, target)
        number = wish if isinstance(wish, int) else None
        found = best_for(
            prices, target, version, job, sizes, number, self._progress("configurations")
        )
        found = replace(found, estimated=_ranged(found.estimated, asked, found.strategy.stages))
        if not beside_plan:
            return found
        plan = choose(self._question(asked))
        return beside(found, plan.best.seconds, plan.best.peak_bytes) if plan.fits else found

    @without_gc()
    def export(self, plan: Plan, stack: str) -> Projection:
        """A plan of this model as another stack runs it, with what that costs and why."""
        target, version = target_named(stack)
        cluster = from_plain(plan.provenance.cluster)
        request = plan.provenance.request
        asked = self._asked(request, cluster, {"mesh": None, "pins": None})
        captures = self._captured(asked, short=request.fold)
        if captures.graph(plan.micro_batches).digest() != plan.provenance.graph:
            check(plan, self._graph(plan, request))  # which says what differs
        prices, job, sizes = self._priced_for(asked, target)
        self._progress("estimating")(0, 1)
        choices = choices_of(target, cluster, sizes)

        def own(stated: Stated) -> float:
            graph = self._stated_graph(asked, stated)
            return estimate_stated(graph, asked.search, stated).step_seconds

        found = project(plan, prices, own, target, version, job, choices)
        return replace(found, estimated=_ranged(found.estimated, asked, found.strategy.stages))

    def scale(
        self,
        clusters: Sequence[Cluster],
        nodes: Sequence[int],
        *,
        stack: str | None = None,
        per_node: bool = False,
        **options: Unpack[Options],
    ) -> Scaling:
        """The model on each of the clusters, with its own plan or as a stack runs it.

        The batch is the planner's, whole; with `per_node` it is that of one node.
        """
        rows = []
        for cluster, count in zip(clusters, nodes, strict=True):
            row = ScaleRow(count, cluster.size)
            try:
                own = self._with_batch(count) if per_node else self
                rows.append(own._scaled(row, cluster, stack, options))
            except (InfeasibleError, InputError) as error:
                rows.append(replace(row, reason=str(error).partition(":")[0]))
        return Scaling(clusters[-1].name, tuple(rows))

    @without_gc()
    def with_batch(
        self,
        wish: Literal["max", "best"],
        *,
        strategy: str | None = None,
        stack: str = OWN.name,
    ) -> tuple[Planner, int]:
        """The same questions of the largest batch that fits, or of the one with the best rate.

        The second result is its number of samples. With a `strategy`, that is what is asked, in
        multiples of what it cuts the batch into; else the plan in one pass (or as many
        micro-batches as the planner's options say), in multiples of the devices.
        """
        if wish not in ("max", "best"):
            raise InputError(f"Unknown batch {wish!r}: write a number, max or best.")
        asked = self._asked(Request(), None, self.options)
        if strategy is None and asked.request.wants_stages:
            raise InputError(
                f"A batch that is {wish} is looked for without stages: leave pipeline out, or "
                "give the batch as a number."
            )
        devices, passes = asked.search.cluster.size, asked.request.micro_batches
        first = next((leaf for leaf in _leaves((self.args, self.kwargs)) if leaf), None)
        if first is None:
            raise InputError("The example batch has no tensor whose samples could be more.")
        if strategy is None:
            each = passes if isinstance(passes, int) else 1
            unit = devices * each
            price = partial(Planner._try_plan, passes=each)
        else:
            stated = parse_strategy(strategy, devices)
            unit = stated.data * stated.micro_batches
            price = partial(Planner._try_strategy, strategy=strategy, stack=stack)

        def try_batch(samples: int) -> Tried:
            self._progress(f"a batch of {samples}")(0, 1)
            return price(self._with_batch(samples / first[0]), samples)

        limit = asked.search.limit
        found = (
            largest(try_batch, unit, limit)[0] if wish == "max" else best(try_batch, unit, limit)
        )
        return self._with_batch(found.samples / first[0]), found.samples

    def _try_strategy(self, samples: int, strategy: str, stack: str) -> Tried:
        e = self.estimate(strategy, stack=stack, beside_plan=False)
        return Tried(samples, e.rate, e.peak_bytes, e.fits)

    def _try_plan(self, samples: int, passes: int) -> Tried:
        asked = self._asked(Request(), None, {**self.options, "micro_batches": passes})
        try:
            found, _ = without_stages(self._question(asked))
        except InfeasibleError as error:
            return Tried(samples, 0.0, error.needed_bytes, fits=False)
        won = found.winner
        return Tried(samples, samples / won.seconds, won.peak_bytes, found.fits)

    def _with_batch(self, factor: float) -> Planner:
        """The same questions of a batch that many times as large."""
        if factor == 1:
            return self
        args, kwargs = scaled((self.args, self.kwargs), factor)
        return Planner(
            self.model,
            args,
            kwargs,
            cluster=self.cluster,
            loss=self.loss,
            rules=self.rules,
            watch=self.watch,
            **self.options,
        )

    def _scaled(
        self, row: ScaleRow, cluster: Cluster, stack: str | None, options: Options
    ) -> ScaleRow:
        if stack is not None:
            told = self.plan_for(stack, cluster=cluster, beside_plan=False, **options)
            e = told.estimated
            figures = (e.step_seconds, e.rate, e.unit, e.peak_bytes)
            return ScaleRow(row.nodes, row.devices, str(told.strategy), *figures)
        asked = self._asked(Request(), cluster, {**self.options, **options})
        plan = choose(self._question(asked))
        if not plan.fits:
            return replace(row, reason="no plan fits in memory")
        count, unit = items_of(self._captured(asked, short=asked.request.fold).graph(1))
        best = plan.best
        how, rate = f"mesh {best.mesh}", count / best.seconds
        if best.micro_batches > 1:
            how += f", {best.micro_batches} micro-batches"
        figures = (best.seconds, rate, unit, best.peak_bytes)
        return ScaleRow(row.nodes, row.devices, how, *figures)

    def _priced_for(self, asked: _Asked, target: Target) -> tuple[Prices, Job, Sizes]:
        """What prices configurations of a stack, and what of the model goes into its file."""
        if precision_named(asked.request.numbers).is_float8:
            raise InputError(
                "No file of another stack says float8 yet: estimate with it, and export "
                "with precision='bf16-mixed'."
            )
        check_overlap(asked.search)
        reduces_half = _reduces_half(asked)
        if reduces_half:
            target.check_reduction()
        asked = _without_masters(asked)
        captures = self._captured(asked, short=asked.request.fold)
        whole = captures.graph(1)
        target.check_model(op.kind for op in whole.ops)
        numbers = "fp32" if asked.request.numbers == "tf32" else asked.request.numbers
        layers = len(Layers.of(whole))
        where = asked.search.cluster
        job = job_of(whole, captures.samples, layers, numbers, where, reduces_half=reduces_half)
        sizes = sizes_of(captures.samples, whole, job, has_plan=_has_tensor_plan(self.model))
        graphs = partial(self._stated_graph, asked)
        return Prices(graphs, asked.search, target, reduces_half=reduces_half), job, sizes

    def _stated_graph(self, asked: _Asked, stated: Stated) -> Graph:
        """The graph of a micro-batch; of a pipeline, one that can be cut between all layers."""
        captures = self._captured(asked, short=asked.request.fold)
        check_number(stated.micro_batches, captures.samples)
        graph = captures.graph(stated.micro_batches)
        if stated.stages > 1 and leaves_out_layers(graph):
            return self._captured(asked, short=False).graph(stated.micro_batches)
        return graph

    @without_gc()
    def explain(
        self,
        plan: Plan,
        *,
        op: str | None = None,
        everything: bool = False,
        seconds: float = 0.0,
        profile: str | Path | Profile | None = None,
    ) -> Explanation:
        """Why `plan` splits operators of the model as it does: what any other split would cost.

        `op` names modules by their paths, with `*` and `?`, or an operator by its name; without it
        the slowest operators are explained. Every other split of an operator is priced exactly,
        with everything else chosen anew around it, on the plan's mesh and within its memory limit.
        `everything` explains each operator that matches, small ones and repeated ones, too. For
        about `seconds`, what would have to change for another split to win is looked for: links,
        memory, the batch. `profile` is the plan's, where its file has moved.
        """
        request = plan.provenance.request
        pricing = self._pricing(request, profile, set())

        def captured(factor: float) -> tuple[Graph, Subdims]:
            graph = self._graph(plan, request, factor)
            return graph, find_subdims(graph, rules_of(graph, {**pricing.rules, **self.rules}))

        graph, subdims = captured(1.0)
        check(plan, graph)
        case, setting = case_of(plan, graph, subdims, from_plain(plan.provenance.cluster), pricing)
        return explain_case(
            case, setting, op, everything, self._progress("explain"), seconds, captured
        )

    @without_gc()
    def what_if(
        self, plan: Plan, *, cluster: str | Cluster | None = None, **changes: Unpack[Options]
    ) -> WhatIf:
        """The best plan if something changes, and what the splits of `plan` would cost there.

        What is not given stays as in `plan`. The planner's batch may be of another size than the
        plan's. The old splits can be priced where a mesh of the same shape exists.
        """
        request = plan.provenance.request
        there = cluster or from_plain(plan.provenance.cluster)
        asked = self._asked(request, there, changes)
        after = self._plan(asked, None)
        try:
            graph = self._graph(plan, asked.request)
        except InputError as error:  # a batch that the plan's micro-batches do not divide
            return WhatIf(plan, after, Kept(None, None, str(error)))
        search = asked.search
        kept = price_elsewhere(
            plan, graph, search.subdims_of(graph), search.cluster, search.pricing, search.optimizer
        )
        return WhatIf(plan, after, kept)

    @without_gc()
    def replan(
        self,
        plan: Plan,
        *,
        cluster: str | Cluster | None = None,
        devices: int | None = None,
        within: int | None = None,
        **changes: Unpack[Options],
    ) -> Plan:
        """Plan again for other devices, with every option of `plan` that is not given here.

        The devices are a `cluster`, or so many `devices` as the plan's has, `within` of them on a
        node and with the same links. A mesh that was asked for stays where it is possible.
        """
        if (cluster is None) == (devices is None):
            raise InputError("Give either a cluster or a number of devices to plan anew for.")
        there = cluster
        if devices is not None:
            there = resized(from_plain(plan.provenance.cluster), devices, within or devices)
        request, notes = plan.provenance.request, tuple[str, ...]()
        target = self._target(there)
        if request.mesh is not None and "mesh" not in changes:
            try:
                mesh_from_text(request.mesh, target)
            except ClusterError:
                changes["mesh"] = None
                notes = (f"The mesh {request.mesh}, asked for before, is not possible here.",)
        return self._plan(self._asked(request, target, changes), None).with_notes(*notes)

    def _target(self, cluster: str | Cluster | None) -> Cluster:
        found = self.cluster if cluster is None else cluster
        if found is None:
            raise InputError('Say which devices to plan for, such as cluster="8xa100".')
        return parse(found) if isinstance(found, str) else found

    def _asked(self, base: Request, cluster: str | Cluster | None, changes: Options) -> _Asked:
        """Options as changes of others, checked, and everything found that they name."""
        target, request = self._target(cluster), base.changed(changes)
        if request.host_pace is not None:
            device = replace(target.device, host_pace=request.host_pace)
            target = replace(target, device=device)
        notes = set(assumed(request.cost, target))
        mesh = changes.get("mesh") or request.mesh
        fixed = mesh_from_text(mesh, target) if isinstance(mesh, str) else mesh
        if fixed is not None and len(fixed.axes) > MOST_AXES:
            raise ClusterError(f"Mesh {fixed} has {len(fixed.axes)} axes; {MOST_AXES} is the most.")
        search = ResolvedRequest(
            target,
            target.meshes() if fixed is None else (fixed,),
            self._pricing(request, changes.get("profile"), notes),
            optimizer_named(request.optimizer),
            request.memory_limit,
            parse_pins(request.pins),
            request.recompute,
            self.rules,
            prefer=request.prefer,
        )
        return _Asked(request, search, notes)

    def _pricing(
        self, request: Request, profile: str | Path | Profile | None, notes: set[str]
    ) -> Pricing:
        found = request.profile_for(profile, self.options.get("profile"))
        pricing = pricing_named(request.cost) if found is None else measured_by(found, notes)
        return replace(pricing, rules={**pricing.rules, **imbalanced(request.imbalance)})

    def _captured(self, asked: _Asked, short: bool) -> Captures:
        """The model as it is traced for a request: once for all that trace it alike."""
        r = asked.request
        key = (r.numbers, r.fold, short, r.cost, r.compile)
        if key not in self._captures:
            self._captures[key] = Captures(
                self.model,
                self.args,
                self.kwargs,
                asked.search.subdims_of,
                lambda: self.watch(Stage("capture", 0, 1)),
                dtype=r.numbers,
                loss=self.loss,
                fold=r.fold,
                short=short,
                is_compiled=r.compile,
            )
        return self._captures[key]

    def _plan(self, asked: _Asked, save_problem: str | Path | None) -> Plan:
        search, request = asked.search, asked.request
        question = self._question(asked)
        captures = question.captures
        if request.compile:
            _check_compiled(captures.graph(1))
        chosen = choose(question)
        won = chosen.selection.winner.case
        if save_problem is not None:
            meta = {"cluster": search.cluster.name, "mesh": str(won.mesh), "unit": "seconds"}
            write_problem(won.unrolled.problem, save_problem, meta=meta)
        self._progress("describe")(0, 1)
        return describe(
            chosen.selection,
            request=request,
            capture_seconds=captures.seconds,
            search_seconds=chosen.seconds,
            model=type(self.model).__name__,
            cuts=captures.cuts(chosen.best.micro_batches),
            pipelines=chosen.pipelines,
        ).with_notes(*sorted(asked.notes))

    def _question(self, asked: _Asked, *, is_short: bool = True) -> Question:
        """What is asked of the planning loop; for stages, of graphs with all layers to cut."""
        short = self._captured(asked, short=asked.request.fold)
        # A pin may tell apart what a short graph takes together.
        is_short = is_short and asked.request.fold and not asked.search.pins
        captures = self._captured(asked, short=is_short)

        def staged() -> Captures:
            is_without = leaves_out_layers(short.graph(1))
            return self._captured(asked, short=False) if is_without else short

        return Question(asked.request, asked.search, captures, staged, self.watch)

    def _graph(self, plan: Plan, request: Request, factor: float = 1.0) -> Graph:
        """The whole graph of a micro-batch of the plan, of a batch that many times as large."""
        from shardfold.capture import capture

        asked = (request.numbers, request.compile)
        if plan.micro_batches == 1 and factor == 1.0:
            for (dtype, *_, compiled), captures in self._captures.items():
                graph = captures.graph(1) if (dtype, compiled) == asked else None
                if graph is not None and graph.operator_count == len(graph.ops):
                    return graph
        key = (*asked, plan.micro_batches, tuple(plan.micro_batch_dims.items()), factor)
        if key not in self._graphs:
            self.watch(Stage("capture", 0, 1))
            part = scaled(example_for(plan, self.args, self.kwargs), factor)
            found = capture(self.model, *part, dtype=request.numbers, loss=self.loss)
            self._graphs[key] = replace(found, is_compiled=request.compile)
        return self._graphs[key]

    def _progress(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.watch(Stage(stage, done, total))


def _leaves(batch: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors of a batch."""
    found: list[tuple[int, ...]] = []
    mapped(batch, lambda _, leaf: found.append(tuple(getattr(leaf, "shape", ()))))
    return found


def _ranged(found: Estimated, asked: _Asked, stages: int) -> Estimated:
    """With the range of the step, where steps like it were measured."""
    request, cluster = asked.request, asked.search.cluster
    spread = spread_of(request.cost, cluster, found.devices, stages, compiled=request.compile)
    if spread is None:
        return found
    return replace(found, step_range_seconds=spread.of(found.step_seconds))


def _check_compiled(graph: Graph) -> None:
    """Refuse what the runner does not compile."""
    written = [graph.tensors[op.inputs[0]].name for op in graph.ops if op.kind == "shardfold.write"]
    if written:
        raise InputError(
            f"Forward updates {', '.join(written[:3])}, which a compiled module cannot: plan "
            "without compile."
        )


def _without_masters(asked: _Asked) -> _Asked:
    """The same for a stack, which says itself what it keeps in float32."""
    return replace(asked, request=asked.request.without_masters)


def _reduces_half(asked: _Asked) -> bool:
    """Whether gradients are to be sent in 16 bits although weights are kept in float32."""
    found = precision_named(asked.request.numbers)
    return found.reduces != found.master


def _has_tensor_plan(model: nn.Module) -> bool:
    """Whether the model, or one inside it, is of transformers and says how it is split."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "base_model_tp_plan", None) for config in configs)


def plan(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    save_problem: str | Path | None = None,
    watch: Watch = ignore,
    **options: Unpack[Options],
) -> Plan:
    """Find the fastest way to train `model` on `cluster` that fits in its memory.

    The arguments are those of `Planner`, the options those of `Options`; `save_problem` is as for
    `Planner.plan`.
    """
    planner = Planner(
        model, args, kwargs, cluster=cluster, loss=loss, rules=rules, watch=watch, **options
    )
    return planner.plan(save_problem=save_problem)


def compare(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    methods: Sequence[str] = METHODS,
    effort: Effort | None = None,
    save_plans: str | Path | None = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    watch: Watch = ignore,
    **options: Unpack[Options],
) -> Comparison:
    """Compare the plan with baselines and other searches: `Planner.compare`.

    All options of `plan` are options of `compare`, too.
    """
    planner = Planner(
        model, args, kwargs, cluster=cluster, loss=loss, rules=rules, watch=watch, **options
    )
    return planner.compare(methods=methods, effort=effort, save_plans=save_plans)


def estimate(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    strategy: str,
    stack: str = OWN.name,
    beside_plan: bool = True,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    watch: Watch = ignore,
    **options: Unpack[Options],
) -> Estimated:
    """The step and memory of a strategy such as `fsdp=8 tp=8 sp`: `Planner.estimate`."""
    planner = Planner(
        model, args, kwargs, cluster=cluster, loss=loss, rules=rules, watch=watch, **options
    )
    return planner.estimate(strategy, stack=stack, beside_plan=beside_plan)


def plan_for(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    stack: str,
    beside_plan: bool = True,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    watch: Watch = ignore,
    **options: Unpack[Options],
) -> StackPlan:
    """The best configuration of a stack such as `torchtitan`, and its file: `Planner.plan_for`."""
    planner = Planner(
        model, args, kwargs, cluster=cluster, loss=loss, rules=rules, watch=watch, **options
    )
    return planner.plan_for(stack, beside_plan=beside_plan)


def explain(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    op: str | None = None,
    everything: bool = False,
    seconds: float = 0.0,
    profile: str | Path | Profile | None = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    watch: Watch = ignore,
) -> Explanation:
    """Why `plan` splits operators as it does: `Planner.explain`.

    `model`, `args`, `kwargs`, `loss` and `rules` are those that the plan was made with.
    """
    planner = Planner(model, args, kwargs, loss=loss, rules=rules, watch=watch)
    return planner.explain(plan, op=op, everything=everything, seconds=seconds, profile=profile)


def what_if(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    cluster: str | Cluster | None = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    watch: Watch = ignore,
    **changes: Unpack[Options],
) -> WhatIf:
    """The best plan if something changes, and the old splits there: `Planner.what_if`."""
    planner = Planner(model, args, kwargs, loss=loss, rules=rules, watch=watch)
    return planner.what_if(plan, cluster=cluster, **changes)
