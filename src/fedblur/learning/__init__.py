"""The client's room: local training, methods, models, and how good a model is."""
