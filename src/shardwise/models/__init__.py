"""Models to train: those built in, and those loaded from a user's module or from Hugging Face."""
