"""The bundled demo models: their training text, their training, their golden answers."""
