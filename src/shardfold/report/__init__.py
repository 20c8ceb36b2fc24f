"""Output: a plan on a terminal, as text, in a notebook, as an HTML page; and progress."""

from shardfold.report.html import notebook_html, to_html
from shardfold.report.terminal import as_text, drawn, plan_view
from shardfold.report.view import PlanView, view

__all__ = ["PlanView", "as_text", "drawn", "notebook_html", "plan_view", "to_html", "view"]
