"""What a forward pass takes on this machine, learned from the passes themselves."""

from bisect import bisect_left, bisect_right


class PassTime:
    """Seconds of a pass by its number of tokens: those of a single token, `one`, and how many times that others take.

    A processor takes hardly longer for a dozen tokens than for one and twice as long for two dozen, a GPU not until
    there are hundreds: so the times are learned by size. Those in between lie on straight lines; beyond the largest
    size that was tried they grow as up to there. All follow what is measured, slowly, so that neither one hiccup nor
    the growth of texts leads them astray. Prompts are no part of it. The figures may only guide how work is divided,
    never what comes out.
    """

    RATE = 0.1  # how far a new measurement moves the old figure
    MORE, TOKENS = 1 / 16, 8  # what each further token is taken to add at first, and how many tokens that is worth

    def __init__(self):
        self.one = 0.0
        self.sizes, self.times, self.seen = [1], [1.0], [1.0]  # tried, ascending; times `one`; how often

    def note(self, tokens: int, seconds: float) -> None:
        """A pass of `tokens` has taken so long."""
        expected = self._times(tokens)
        if not self.one:
            self.one = seconds / expected
            return
        seconds = min(seconds, 1.5 * self.one * expected)  # the machine was busy with something else
        self.one += self.RATE * (seconds / expected - self.one) / expected**2  # many tokens measure little of it
        if (size := self._size(tokens)) == 1:
            return
        found = seconds / self.one * self._times(size) / expected
        i = bisect_left(self.sizes, size)
        if i == len(self.sizes) or self.sizes[i] != size:
            self.sizes.insert(i, size)
            self.times.insert(i, found)
            self.seen.insert(i, 0.0)
        self.seen[i] += 1
        self.times[i] += max(self.RATE, 1 / self.seen[i]) * (found - self.times[i])

    @staticmethod
    def _size(tokens: int) -> int:
        """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
        step = 1 << max(0, tokens.bit_length() - 2)
        return (tokens + step // 2) // step * step

    def _times(self, tokens: int) -> float:
        """How many times the seconds of a single token a pass takes; never less than once."""
        i = bisect_right(self.sizes, tokens) - 1
        size, times = self.sizes[i], self.times[i]
        if tokens == size:
            slope = 0.0
        elif i + 1 < len(self.sizes):
            slope = (self.times[i + 1] - times) / (self.sizes[i + 1] - size)
        else:
            slope = max(0.0, (times - 1 + self.MORE * self.TOKENS) / (size - 1 + self.TOKENS))
        return max(1.0, times + slope * (tokens - size))

    def seconds(self, tokens: int) -> float:
        """What a pass of so many tokens is expected to take; 0 before anything was measured."""
        return self.one * self._times(tokens)

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
