"""A sibling that nobody has imported before the call."""


def weigh_word(word: str) -> int:
    """Return the weight of a word."""
    return len(word)
