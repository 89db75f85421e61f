"""From a checkpoint folder to loaded models with their pools."""
