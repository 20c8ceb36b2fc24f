"""Pipelines: schedules as data, a simulator of all stages, and where a model is cut."""

from shardfold.pipeline.schedules import SCHEDULES, Action, Piece, Pipeline
from shardfold.pipeline.simulator import PipelineSimulation, StageTimes, simulate, timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Piece",
    "Pipeline",
    "PipelineSimulation",
    "StageTimes",
    "simulate",
    "timeline",
]
