"""Values of ``log(…)`` also go to TensorBoard, MLflow or Weights & Biases."""
