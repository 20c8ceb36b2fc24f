"""The command line: parse, call, print. A command is imported when it is used."""

from __future__ import annotations

import atexit
import gc
from importlib import import_module
from typing import Any

import click

from shardfold import __version__
from shardfold.errors import LostError, ShardfoldError

# Where each command lives, and its line in the help: listing them imports none of them.
COMMANDS = {
    "plan": ("shardfold.cli.plan", "Find the best way to train a model on a cluster."),
    "estimate": ("shardfold.cli.plan", "Price the strategy that you run, beside the plan."),
    "scale": ("shardfold.cli.plan", "Plan for 1, 2, 4, ... nodes: step, throughput, cost."),
    "export": ("shardfold.cli.stacks", "Write a saved plan as another stack's configuration."),
    "show": ("shardfold.cli.inspect", "Print a saved plan, or check it against a model."),
    "report": ("shardfold.cli.inspect", "Draw a saved plan as one HTML page."),
    "explain": ("shardfold.cli.explain", "Say why operators are split as they are."),
    "what-if": ("shardfold.cli.explain", "Plan again with something changed, and compare."),
    "compare": ("shardfold.cli.compare", "Compare the best plan with other methods, or two plans."),
    "simulate": ("shardfold.cli.inspect", "Simulate a plan's step: time, memory, a trace."),
    "check": ("shardfold.cli.run", "Compare two steps under a plan with the plain module."),
    "train": ("shardfold.cli.run", "Train a model under a plan."),
    "launch": ("shardfold.cli.launch", "Print the torchrun commands that start a plan."),
    "models": ("shardfold.cli.model", "List the models of the zoo."),
    "clusters": ("shardfold.cli.hardware", "List the known hardware, or show one cluster."),
    "calibrate": ("shardfold.cli.hardware", "Measure this machine, to price plans by it."),
    "solve": ("shardfold.cli.solve", "Solve a search problem from a file."),
}
# Exit codes, as docs/reference/cli.md has them; 1 is `check`'s: something differs.
REFUSED, LOST, INTERRUPTED = 2, 3, 130


class Refused(click.ClickException):
    """What the user gave cannot be used: one message, no traceback."""

    exit_code = REFUSED


class Lost(click.ClickException):
    """A process of the run ended: one message, and another exit code than for wrong input."""

    exit_code = LOST


class Interrupted(click.ClickException):
    """The user pressed Ctrl-C."""

    exit_code = INTERRUPTED


class LazyGroup(click.Group):
    """Commands that are imported on use; the errors of shardfold end in one message."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, the most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the command called `name`."""
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[name][0]), name.replace("-", "_"))
        # click keeps the lines after a backspace as they are; a raw docstring has it spelled out.
        command.help = (command.help or "").replace("\\b\n", "\b\n")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from shardfold.errors import nearest

            ctx.fail(f"No command is called {args[0]!r}. {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; turn shardfold's errors and Ctrl-C into a message and an exit code."""
        try:
            return super().invoke(ctx)
        except LostError as error:
            raise Lost(str(error)) from error
        except ShardfoldError as error:
            raise Refused(str(error)) from error
        except KeyboardInterrupt as stop:
            raise Interrupted("Interrupted.") from stop


HELP = """Find the best way to split the training of a PyTorch model over many devices.

\b
shardfold plan alexnet --cluster 4x8x1080ti
shardfold plan train.py:make --cluster 8xa100 --save plan.json
"""


@click.group(cls=LazyGroup, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardfold")
def main() -> None:
    """The command line."""
    atexit.register(gc.freeze)  # else Python looks for cycles in all graphs before it ends
