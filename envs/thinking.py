"""What is thought aloud in a reply is no answer."""

__all__ = ["without_thinking"]


def without_thinking(text: str) -> str:
    """A text without what is up to the last `</think>`, and from a `<think>` that is never closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]
