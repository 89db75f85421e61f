"""Text in and out: tokenizers, chat templates in their sandbox, detokenizing, stop strings."""
