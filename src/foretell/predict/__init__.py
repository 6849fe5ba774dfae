"""One layout or thousands: seconds, memory, and where they go."""

from foretell.predict.predict import Prediction, predict, predict_many, predicted

__all__ = ["Prediction", "predict", "predict_many", "predicted"]
