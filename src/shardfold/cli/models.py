"""`shardfold models`: what the zoo holds."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from shardfold.zoo.catalog import Entry, entry, names


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def models(as_json: bool) -> None:
    r"""List the models of the zoo, with the batch that each is planned for.

    \b
    shardfold models
    shardfold models --json
    """
    entries = [entry(name) for name in names()]
    if as_json:
        click.echo(json.dumps([asdict(known) for known in entries], indent=2))
        return
    _print([known for known in entries if not known.is_tiny])


def _print(entries: list[Entry]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        caption="Each has a laptop-sized variant with the same structure: alexnet-tiny, ... "
        "hf: from Hugging Face transformers (pip install 'shardfold\\[hf]').",
        caption_justify="left",
    )
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("seq", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for known in entries:
        origin = "hf" if "Hugging Face" in known.source else ""
        seq = "" if known.seq is None else str(known.seq)
        table.add_row(known.name, known.summary, str(known.batch), seq, origin)
    Console().print(table)
