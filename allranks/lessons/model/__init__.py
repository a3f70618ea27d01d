"""The α-β cost model of an allreduce: fit it, predict a time, predict how a step scales."""

from allranks.lessons.model.costs import fit_overlap, predict, predict_step
from allranks.lessons.model.fabrics import HGX_H100, P100_25GBE, Fabric
from allranks.lessons.model.fitting import Measurement, fit
from allranks.records.lessons import Prediction, StepPrediction

__all__ = [
    "HGX_H100",
    "P100_25GBE",
    "Fabric",
    "Measurement",
    "Prediction",
    "StepPrediction",
    "fit",
    "fit_overlap",
    "predict",
    "predict_step",
]
