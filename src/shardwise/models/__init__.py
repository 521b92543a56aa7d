"""Models: those built in, known dimensions and the decoder built from them, and the user's own."""
