"""A penalty for saying the same again."""


def repetition(text: str, ngram: int = 3, **row: object) -> float:
    """From 0.0, every n-gram of words is new, down towards -1.0, all are the same one.

    -(1 - distinct / all), over words as blanks divide them, in lower case (the measure of
    Demystify-Long-CoT, Yeo et al. 2025). Fewer words than ``ngram`` give 0.0.
    """
    words = text.lower().split()
    grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


def check_repetition(ngram: int = 3) -> None:
    """Raise ValueError where ``ngram`` is no length."""
    if ngram < 1:
        raise ValueError(f"reward repetition: ngram is {ngram}: take 1 or more")
