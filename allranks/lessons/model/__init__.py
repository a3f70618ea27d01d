"""The α-β cost model of an allreduce: fit it, predict a time, predict how a step scales."""

from allranks.lessons.model.costs import (
    HGX_H100,
    P100_25GBE,
    Fabric,
    fit_overlap,
    predict,
    predict_step,
)
from allranks.lessons.model.fitting import Measurement, fit
from allranks.lessons.records import Prediction, StepPrediction

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
