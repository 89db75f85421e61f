"""The bundled demo models: their training text, training and evaluation."""
