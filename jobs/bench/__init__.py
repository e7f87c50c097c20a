"""The bench: every method on the same gradients, timed by stage, with words and messages."""
