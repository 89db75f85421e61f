"""The expected times of passes on this machine, learned from measured passes."""

from bisect import bisect_left, bisect_right


class Overlap:
    """Whether searches in two halves, one on a GPU while the host works on the other, are faster than all at once.

    A pass of half of the tokens may take as long as one of all, so halves pay if the host's work takes longer than a
    pass. Seconds are moving averages.
    """

    RATE = 0.1  # weight of a new measurement

    def __init__(self):
        self.host = self.device = 0.0  # seconds of the host for a search, of the device for a pass

    def note(self, host: float, device: float, searches: int) -> None:
        """Record the seconds of the host and of the device for a pass of `searches` searches."""
        if not self.device:
            self.host, self.device = host / searches, device
        self.host += self.RATE * (host / searches - self.host)
        self.device += self.RATE * (device - self.device)

    def helps(self, searches: int) -> bool:
        """Whether halves are faster for `searches` searches."""
        return searches > 1 and self.device > 0 and self.host * searches > self.device

    def helps_without(self, silent: int, searches: int) -> bool:
        """Whether passes that are launched ahead hide more time than is lost by searches that then miss a pass.

        All searches hide their host's work, at most the time of a pass; those that miss a pass lose their part of it.

        Args:
            silent: number of searches that miss a pass.
            searches: number of all searches.
        """
        if 2 * silent > searches:
            return False
        return not self.device or silent * self.device <= searches * min(self.host * searches, self.device)


class PassTime:
    """Seconds of a pass by its number of tokens: `one` for a single token, and for other sizes multiples of it.

    A processor takes hardly longer for a dozen tokens than for one and twice as long for two dozen, a GPU only for
    hundreds, so the times are learned by size. Sizes in between are interpolated linearly; beyond the largest measured
    size the times grow at the mean rate up to it. All figures are moving averages, which outliers and growing texts
    change slowly. Prompts are excluded. The figures may guide how work is divided, never the output.
    """

    RATE = 0.1  # weight of a new measurement
    MORE, TOKENS = 1 / 16, 8  # prior: the cost of each further token, relative to `one`, and its weight in tokens

    def __init__(self):
        self.one = 0.0
        self.sizes, self.times, self.seen = [1], [1.0], [1.0]  # measured sizes, ascending; multiples; measurements

    def note(self, tokens: int, seconds: float) -> None:
        """Record the time of a pass of `tokens` tokens."""
        expected = self._times(tokens)
        if not self.one:
            self.one = seconds / expected
            return
        seconds = min(seconds, 1.5 * self.one * expected)  # longer: the machine was busy
        self.one += self.RATE * (seconds / expected - self.one) / expected**2  # large passes say little about `one`
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
        """The expected time of a pass as a multiple of `one`; at least 1."""
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
        """The expected seconds of a pass of `tokens` tokens; 0 before the first measurement."""
        return self.one * self._times(tokens)

    def charge(self, tokens: int, beside: int, others: int) -> float:
        """A search's share of the seconds of a pass: an equal part of the pass with one token of this search, and the
        whole cost of its further tokens.

        Args:
            tokens: tokens of this search.
            beside: tokens of the other searches.
            others: number of other searches.
        """
        base = self.seconds(1 + beside)
        return base / (1 + others) + self.seconds(tokens + beside) - base
