"""Keeps other libraries' chatter off stdout and stderr while a model is built and captured."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet(*, mute: bool = False) -> Iterator[None]:
    """No warnings, no advice of torch or transformers; what is printed goes to stderr.

    stdout belongs to the command's own output, so that it can be piped. Under `mute` what is
    printed goes nowhere: where tracing fails, torch prints the program that it had so far.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    loggers = [logging.getLogger(name) for name in ("torch", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            sink = stack.enter_context(open(os.devnull, "w")) if mute else sys.stderr
            stack.enter_context(redirect_stdout(sink))
            stack.enter_context(redirect_stderr(sink))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
