"""The α-β cost model of an allreduce, on every rank: fit, predict, and how a step scales."""

from allranks.collectives.model.fabric import Fabric
from allranks.collectives.model.fabrics import HGX_H100, P100_25GBE
from allranks.collectives.model.fitting import Measurement, fit
from allranks.collectives.model.predicting import predict
from allranks.collectives.model.scaling import fit_overlap, predict_step
from allranks.records.predictions import Prediction, StepPrediction

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
