"""What a forward pass takes on this machine, learned from the passes themselves."""


class PassTime:
    """Seconds of a pass by its number of tokens: `one` for a single token, each further one `more` times that.

    Both follow what is measured, slowly, so that neither one hiccup nor the growth of texts leads them astray. Prompts
    are no part of it. The figures may only guide how work is divided, never what comes out.
    """

    RATE = 0.1  # how far a new measurement moves the old figure
    MORE = 1 / 16  # until measured
    MANY = 8  # tokens of a pass that say something about `more`

    def __init__(self):
        self.one, self.more = 0.0, self.MORE

    def note(self, tokens: int, seconds: float) -> None:
        """A pass of `tokens` has taken so long."""
        expected = self.seconds(tokens)
        if not expected:
            self.one = seconds / (1 + self.more * (tokens - 1))
            return
        seconds = min(seconds, 1.5 * expected)  # the machine was busy with something else
        # A pass of few tokens tells of `one`, a pass of many of `more`.
        share, further = self.one / expected, tokens - 1
        self.one += self.RATE * share**2 * (seconds * share - self.one)
        if further:
            slope = (seconds / self.one - 1) / further
            self.more = max(0.0, self.more + self.RATE * further**2 / (further**2 + self.MANY**2) * (slope - self.more))

    def seconds(self, tokens: int) -> float:
        """What a pass of so many tokens is expected to take; 0 before anything was measured."""
        return self.one * (1 + self.more * (tokens - 1))

    def charge(self, tokens: int, beside: int, others: int) -> float:
        """What a search owes for its tokens in a pass that it shares: an equal part of the pass as it would be with one
        token of its own, and all that its further tokens add.

        Args:
            tokens: that it brings.
            beside: tokens that the others bring.
            others: how many searches they are.
        """
        base = self.seconds(1 + beside)
        return base / (1 + others) + self.seconds(tokens + beside) - base
