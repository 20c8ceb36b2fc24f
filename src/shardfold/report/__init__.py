"""Plans and progress drawn for the terminal."""

from shardfold.report.progress import drawn
from shardfold.report.terminal import plan_view

__all__ = ["drawn", "plan_view"]
