"""Figures: a curve that grows while a network trains, and finished plots.

==================  =====================================================
`Animator`          a live curve: in a notebook, or an image file
`plot_history`      one training: its losses and accuracies
`plot_runs`         trainings: accuracy, loss and speed
`plot_timings`      named timings, as "Automatic Parallelism" prints them
`plot_graph`        the graph of one training step on two GPUs
==================  =====================================================

Everything is drawn through matplotlib's object interface (`Figure` on an
Agg canvas). `pyplot` is never imported: no window opens, and the user's own
plots keep their settings. Matplotlib is loaded when the first figure is
made, not when this package is imported.
"""
from mgpu.tools.plotting.animator import Animator
from mgpu.tools.plotting.charts import (plot_history, plot_runs,
                                        plot_timings)
from mgpu.tools.plotting.graph import plot_graph
from mgpu.utils.files import FilePath

__all__ = ["Animator", "FilePath", "plot_graph", "plot_history",
           "plot_runs", "plot_timings"]
