"""The definition: how symbols are linked when they are added, and which draft follows from the matches of a tail."""

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from kernels.suffixes.state import BOUNDARY, LONG, PAIR, SHORT, SINGLE, Suffixes, token_bits

MULTIPLIER = 0x9E3779B97F4A7C15
MOST_VISITED = 16  # places that a tail is compared with, per text
MOST_MATCHED = 32  # symbols of a tail that are compared
REACH = 4  # matches shorter than the longest by more count for nothing
DOUBT = 6.0  # occurrences of unseen tokens for each one seen, over the length of the match to the power of 1.5

Source = tuple[Suffixes, int, int]  # a text, the mark of its symbols, and its bonus in symbols
Place = tuple[int, int, int]  # a source, the age of what followed the tail there, the length that matches, and a bonus
Nodes = tuple[list[int], list[int], list[float]]  # tokens, parents, scores, as in `engine.drafts.Draft`


def hashed(symbols: Sequence[int]) -> int:
    """The hash of a context, 64 bits; tables use the highest ones."""
    found = 0
    for symbol in reversed(symbols):
        found = (found + symbol + 1) * MULTIPLIER % (1 << 64)
        found ^= found >> 29
    return found * MULTIPLIER % (1 << 64)


def head(table: memoryview, context: Sequence[int]) -> int:
    """The place of a context's head in a table."""
    return hashed(context) >> 65 - len(table).bit_length()


def at(text: Suffixes, age: int) -> int:
    """The place in the ring of the symbol of this age; the newest has 1."""
    return (text.fields.written - age) % text.fields.capacity


def chains(text: Suffixes) -> list[tuple[int, memoryview, memoryview]]:
    """The size of the contexts, the heads and the distances of each kind of chain, longest first."""
    found = [(LONG, text.long_heads, text.long_back), (SHORT, text.short_heads, text.short_back)]
    if text.fine:
        found += [(PAIR, text.pair_heads, text.pair_back), (SINGLE, text.single_heads, text.single_back)]
    return found


def add(text: Suffixes, symbols: Sequence[int], mark: int) -> None:
    """Append symbols, with the bits of `mark` set, and link each to its chains."""
    fields = text.fields
    for number in symbols:
        symbol = number | mark
        if symbol == BOUNDARY:
            _write(text, symbol)
            fields.since = 0
            continue
        before = [text.symbols[at(text, age)] for age in range(min(LONG, fields.since), 0, -1)]
        place = fields.written % fields.capacity
        for size, heads, back in chains(text):
            back[place] = 0
            if len(before) >= size:
                where = head(heads, before[-size:])
                back[place] = (fields.written - heads[where]) % (1 << 32)
                heads[where] = fields.written % (1 << 32)
        if len(before) >= PAIR and not text.fine:
            text.pair_heads[head(text.pair_heads, before[-PAIR:])] = fields.written % (1 << 32)
        _write(text, symbol)
        fields.since += 1


def _write(text: Suffixes, symbol: int) -> None:
    fields = text.fields
    text.symbols[fields.written % fields.capacity] = symbol
    fields.written += 1
    fields.kept = min(fields.kept + 1, fields.capacity)


def chain(text: Suffixes, heads: memoryview, back: memoryview, context: Sequence[int], most: int) -> list[int]:
    """The ages of the newest places of a context's chain, newest first."""
    found: list[int] = []
    age = (text.fields.written - heads[head(heads, context)]) % (1 << 32)
    while 0 < age <= text.fields.kept and len(found) < most:
        found.append(age)
        step = back[at(text, age)]
        if not step:
            break
        age += step
    return found


def matched(text: Suffixes, age: int, tail: Sequence[int]) -> int:
    """How many of the last symbols of a tail lie before a place."""
    length = 0
    while (
        length < len(tail)
        and age + length < text.fields.kept
        and text.symbols[at(text, age + length + 1)] == tail[-1 - length]
    ):
        length += 1
    return length


def find(text: Suffixes, tail: Sequence[int]) -> list[tuple[int, int]]:
    """The places after contexts that end a tail: their ages, and the lengths that match; the longest chain first."""
    found: list[tuple[int, int]] = []
    left, most = MOST_VISITED, len(tail) + 1  # longer matches were in the chain before
    for size, heads, back in chains(text):
        if len(tail) >= size:
            ages = chain(text, heads, back, tail[-size:], left)
            left -= len(ages)
            found += [(age, length) for age in ages if size <= (length := matched(text, age, tail)) < most]
            most = size
    if len(tail) >= PAIR and not found and not text.fine:
        ages = chain(text, text.pair_heads, text.short_back, tail[-PAIR:], left)
        found += [(age, length) for age in ages if (length := matched(text, age, tail)) >= PAIR]
    return found


def known(text: Suffixes, symbols: Sequence[int], mark: int) -> int:
    """How many of the first symbols are in the text already, one after the other; 0 if not even LONG are."""
    most, symbols = 0, [symbol | mark for symbol in symbols]
    if len(symbols) < LONG:
        return 0
    for age in chain(text, text.long_heads, text.long_back, symbols[:LONG], MOST_VISITED):
        if matched(text, age, symbols[:LONG]) == LONG:
            length = LONG
            while length < len(symbols) and age > length - LONG:
                if text.symbols[at(text, age - length + LONG)] != symbols[length]:
                    break
                length += 1
            most = max(most, length)
    return most


def foreign(symbols: memoryview, vocab_size: int, listed: bytes) -> int:
    """The place of the first symbol that is neither a boundary nor a token with a listed mark; their number if none."""
    bits = token_bits(vocab_size)
    for place, symbol in enumerate(symbols):
        number, token = symbol >> bits, symbol & (1 << bits) - 1
        if symbol != BOUNDARY and not (token < vocab_size and number < len(listed) and listed[number]):
            return place
    return len(symbols)


def propose(sources: Sequence[Source], tail: Sequence[int], nodes: int, depth: int, least: float) -> Nodes:
    """Draft what followed the longest suffixes of a tail, best first.

    The places of a node are those that match the tail and continue like the path to the node, and, in a fine text,
    those that match the tail and the path; tokens that follow them are proposed as children. A place counts 1 if its
    match is the longest of the node's places, and a quarter as much for each symbol by which it is shorter. The share
    of a token is the count of the places that it follows, divided by the count of all places plus a doubt. The doubt
    grows with the number of different tokens and shrinks with the length of the longest match; its form and DOUBT were
    fitted to sources of Python and to answers of a model. A node's score is its parent's score times its share.

    Args:
        sources: texts.
        tail: the last tokens of a path.
        nodes: most nodes.
        depth: most tokens ahead.
        least: the least score of a node.

    Returns:
        a tree of tokens: the likeliest node first, of equals the one with the older parent, then the lower token.
    """
    tail = list(tail[-MOST_MATCHED:])
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    heap: list[tuple[float, int, int, int, list[Place]]] = []
    parent, level, chance = -1, 0, 1.0
    places = [place for number, source in enumerate(sources) for place in _found(number, source, tail, 0)]
    while True:
        if level < depth:
            if level:
                ahead, above = list[int](), parent
                while above >= 0:
                    ahead, above = [tokens[above], *ahead], parents[above]
                path = [*tail, *ahead][-MOST_MATCHED:]
                for number, source in enumerate(sources):
                    if source[0].fine:
                        places = [place for place in places if place[0] != number]
                        places += _found(number, source, path, level)
            for token, share, below in _shares(sources, places, level):
                if chance * share >= least:
                    heappush(heap, (-chance * share, parent, token, level + 1, below))
        if not heap or len(tokens) == nodes:
            return tokens, parents, scores
        chance, above, token, level, places = heappop(heap)
        chance, parent = -chance, len(tokens)
        tokens.append(token)
        parents.append(above)
        scores.append(chance)


def _found(number: int, source: Source, path: Sequence[int], level: int) -> list[Place]:
    """Places of a source, as if they had been found so many symbols before."""
    text, mark, bonus = source
    marked = [symbol | mark for symbol in path]
    return [(number, age + level, length + bonus - level) for age, length in find(text, marked)]


def _shares(sources: Sequence[Source], places: Sequence[Place], level: int) -> list[tuple[int, float, list[Place]]]:
    """The tokens so many symbols after some places, the share of each, and its places."""
    going = list[tuple[int, Place]]()  # the next token of a place
    for place in places:
        number, age, _ = place
        text, mark, _ = sources[number]
        if age <= level:
            continue
        symbol = text.symbols[at(text, age - level)]
        token = symbol & text.fields.token_mask
        if symbol - token == mark:  # else another's text, or a boundary
            going.append((token, place))
    longest = max((place[2] for _, place in going), default=0)
    below: dict[int, list[Place]] = {}
    for token, place in going:
        if place[2] >= longest - REACH:
            below.setdefault(token, []).append(place)
    if not below:
        return []
    counts = {token: sum(4.0 ** (n - longest) for *_, n in some) for token, some in below.items()}
    reached = float(longest + level)
    total = sum(counts.values()) + DOUBT * len(below) / (reached * math.sqrt(reached))
    return [(token, counts[token] / total, some) for token, some in below.items()]
