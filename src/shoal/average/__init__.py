"""Gradient averaging for programs of any framework: named arrays in, averaged arrays out.

`Averager` is the public class; front ends also use the modules below it.
"""

from shoal.average.averager import Averager
from shoal.average.compress import ChunkTopK, ErrorFeedback
from shoal.average.diloco import DiLoCo, OuterSGD
from shoal.average.layout import ArraySpec, Extent, FusionBuffer, Layout
from shoal.average.preparing import NotFinite
from shoal.average.report import AveragingReport
from shoal.average.step_times import StepTimes

__all__ = [
    "Averager",
    "ChunkTopK",
    "ErrorFeedback",
    "DiLoCo",
    "OuterSGD",
    "NotFinite",
    "AveragingReport",
    "StepTimes",
    "Layout",
    "FusionBuffer",
    "ArraySpec",
    "Extent",
]
