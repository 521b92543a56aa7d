"""Inference with models that do not fit: weights that travel to the device in each pass."""

from shardwise.inference.start import stream
from shardwise.inference.streamed_model import StreamedModel, WeightStream

__all__ = ["StreamedModel", "WeightStream", "stream"]
