// Finds suffixes of texts by chains of places. reference.py defines every step, state.py the memory.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../operators.h"

namespace {

constexpr uint32_t BOUNDARY = 0xffffffff;
constexpr uint64_t MULTIPLIER = 0x9e3779b97f4a7c15;
constexpr int64_t SINGLE = 1, PAIR = 2, SHORT = 3, LONG = 6;
constexpr int64_t MOST_VISITED = 16, MOST_MATCHED = 32, REACH = 4;
constexpr double DOUBT = 6.0;
constexpr int64_t BLOCK = 32;  // symbols whose heads are prefetched together

uint64_t mixed(uint64_t hash, uint32_t symbol) {
    hash = (hash + symbol + 1) * MULTIPLIER;
    return hash ^ hash >> 29;
}

int log2_of(int64_t power) { return 63 - __builtin_clzll((uint64_t)power); }

int64_t head_of(uint64_t hash, int64_t heads) { return (int64_t)(hash * MULTIPLIER >> (64 - log2_of(heads))); }

// The ring, with places by age.
struct Ring {
    const Suffixes& text;
    int64_t end;  // the place after the newest

    explicit Ring(const Suffixes& text) : text(text), end(text.written % text.capacity) {}
    int64_t at(int64_t age) const { return end >= age ? end - age : end - age + text.capacity; }
    uint32_t symbol(int64_t age) const { return text.symbols[at(age)]; }
};

// Writes the ages of the newest places of a chain and returns their number. Prefetches the symbols they are compared
// with.
int64_t chain(const Ring& ring, const uint32_t* heads, int64_t size, const uint32_t* back, uint64_t hash, int64_t most,
              int64_t* ages) {
    int64_t count = 0;
    int64_t age = (uint32_t)((uint64_t)ring.text.written - heads[head_of(hash, size)]);
    while (age > 0 && age <= ring.text.kept && count < most) {
        ages[count++] = age;
        const int64_t place = ring.at(age);
        __builtin_prefetch(ring.text.symbols + place);
        if (!back[place]) break;
        age += back[place];
    }
    return count;
}

int64_t matched(const Ring& ring, int64_t age, const uint32_t* tail, int64_t length) {
    int64_t found = 0;
    while (found < length && age + found < ring.text.kept && ring.symbol(age + found + 1) == tail[length - 1 - found])
        found++;
    return found;
}

// A source, the age of the symbol that followed the tail there, and the matching length including the source's bonus.
struct Place {
    int64_t source, age, length;
};

// Appends the places of a source, as if they had been found `level` symbols earlier.
void find(const Ring& ring, int64_t source, int64_t bonus, int64_t level, const uint32_t* tail, int64_t length,
          std::vector<Place>& found) {
    uint64_t hash = 0, hashes[LONG + 1];
    for (int64_t n = 1; n <= std::min(length, LONG); n++) hashes[n] = hash = mixed(hash, tail[length - n]);
    const Suffixes& text = ring.text;
    const size_t before = found.size();
    int64_t ages[MOST_VISITED], left = MOST_VISITED, most = INT64_MAX;
    auto take = [&](int64_t size, const uint32_t* heads, int64_t number, const uint32_t* back) {
        if (length < size) return;
        const int64_t count = chain(ring, heads, number, back, hashes[size], left, ages);
        left -= count;
        for (int64_t i = 0; i < count; i++) {
            const int64_t n = matched(ring, ages[i], tail, length);
            if (n >= size && n < most) found.push_back({source, ages[i] + level, n + bonus - level});
        }
        most = size;
    };
    take(LONG, text.long_heads, text.heads, text.long_back);
    take(SHORT, text.short_heads, text.heads, text.short_back);
    if (text.pair_back) {
        take(PAIR, text.pair_heads, text.heads / 4, text.pair_back);
        take(SINGLE, text.single_heads, text.heads / 4, text.single_back);
    } else if (found.size() == before) {
        most = INT64_MAX;
        take(PAIR, text.pair_heads, text.heads / 4, text.short_back);
    }
}

// A node that may be drafted. Its places are places start .. start + count - 1 of a pool.
struct Open {
    double chance;
    int64_t parent, token, level, start, count;

    bool operator<(const Open& other) const {  // whether it comes later in the draft
        if (chance != other.chance) return chance < other.chance;
        return parent != other.parent ? parent > other.parent : token > other.token;
    }
};

}  // namespace

extern "C" void coppice_suffixes_add(Suffixes* text, const uint32_t* symbols, int64_t count, int64_t mark) {
    Suffixes& t = *text;
    int64_t place = t.written % t.capacity;
    int64_t heads[BLOCK][LONG + 1], sizes[BLOCK];  // heads by context size; how many symbols precede each
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t block = std::min(BLOCK, count - first), start = place;
        for (int64_t i = 0; i < block; i++) {
            const uint32_t symbol = symbols[first + i] | (uint32_t)mark;
            sizes[i] = symbol == BOUNDARY ? 0 : std::min(t.since, LONG);
            uint64_t hash = 0;
            for (int64_t n = 1, from = place; n <= sizes[i]; n++) {
                from = from ? from - 1 : t.capacity - 1;
                hash = mixed(hash, t.symbols[from]);
                heads[i][n] = head_of(hash, n <= PAIR ? t.heads / 4 : t.heads);
                if (n == PAIR) __builtin_prefetch(t.pair_heads + heads[i][n], 1);
                if (n == SHORT) __builtin_prefetch(t.short_heads + heads[i][n], 1);
                if (n == LONG) __builtin_prefetch(t.long_heads + heads[i][n], 1);
            }
            t.symbols[place] = symbol;
            t.since = symbol == BOUNDARY ? 0 : t.since + 1;
            place = place + 1 == t.capacity ? 0 : place + 1;
        }
        for (int64_t i = 0, to = start; i < block; i++, to = to + 1 == t.capacity ? 0 : to + 1) {
            const uint32_t now = (uint32_t)(t.written + i);
            if (t.symbols[to] == BOUNDARY) continue;
            auto link = [&](uint32_t* back, uint32_t* table, int64_t size) {
                const bool linked = sizes[i] >= size;
                if (back) back[to] = linked ? now - table[heads[i][size]] : 0;
                if (linked) table[heads[i][size]] = now;
            };
            link(t.long_back, t.long_heads, LONG);
            link(t.short_back, t.short_heads, SHORT);
            link(t.pair_back, t.pair_heads, PAIR);
            if (t.single_back) link(t.single_back, t.single_heads, SINGLE);
        }
        t.written += block;
        t.kept = std::min(t.kept + block, t.capacity);
    }
}

extern "C" int64_t coppice_suffixes_known(const Suffixes* text, const uint32_t* symbols, int64_t count, int64_t mark) {
    if (count < LONG) return 0;
    const Ring ring(*text);
    uint32_t first[LONG];
    uint64_t hash = 0;
    for (int64_t i = 0; i < LONG; i++) first[i] = symbols[i] | (uint32_t)mark;
    for (int64_t i = LONG; i-- > 0;) hash = mixed(hash, first[i]);
    int64_t ages[MOST_VISITED], most = 0;
    const int64_t found = chain(ring, text->long_heads, text->heads, text->long_back, hash, MOST_VISITED, ages);
    for (int64_t i = 0; i < found; i++) {
        if (matched(ring, ages[i], first, LONG) < LONG) continue;
        int64_t length = LONG;
        while (length < count && ages[i] > length - LONG &&
               ring.symbol(ages[i] - length + LONG) == (symbols[length] | (uint32_t)mark))
            length++;
        most = std::max(most, length);
    }
    return most;
}

extern "C" int64_t coppice_suffixes_foreign(const uint32_t* symbols, int64_t count, int64_t vocab, int64_t bits,
                                            const uint8_t* listed, int64_t numbers) {
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t number = symbols[i] >> bits;
        const bool owned = (symbols[i] & mask) < vocab && number < numbers && listed[number];
        if (!owned && symbols[i] != BOUNDARY) return i;
    }
    return count;
}

extern "C" int64_t coppice_suffixes_propose(const SuffixSource* sources, int64_t count, const uint32_t* tail,
                                            int64_t length, int64_t nodes, int64_t depth, double least, int64_t* tokens,
                                            int64_t* parents, double* scores) {
    const int64_t compared = std::min(length, MOST_MATCHED);
    std::vector<Ring> rings;
    std::vector<Place> places, fresh, next;
    for (int64_t s = 0; s < count; s++) rings.emplace_back(*sources[s].text);
    std::vector<Open> heap;
    std::vector<int64_t> order;  // indices into `next`, by token
    std::vector<int64_t> token_of;
    Open node{1.0, -1, 0, 0, 0, 0};
    int64_t made = 0;
    for (int64_t parent = -1;;) {
        if (node.level < depth) {
            // The last symbols of the tail and the path, and the node's places.
            uint32_t path[MOST_MATCHED], marked[MOST_MATCHED];
            int64_t at = MOST_MATCHED;
            for (int64_t above = parent; above >= 0 && at > 0; above = parents[above]) path[--at] = (uint32_t)tokens[above];
            for (int64_t i = 1; i <= compared && at > 0; i++) path[--at] = tail[length - i];
            fresh.clear();
            for (int64_t i = 0; i < node.count; i++)
                if (!rings[places[node.start + i].source].text.pair_back) fresh.push_back(places[node.start + i]);
            for (int64_t s = 0; s < count; s++) {
                if (node.level && !rings[s].text.pair_back) continue;
                for (int64_t i = at; i < MOST_MATCHED; i++) marked[i] = path[i] | (uint32_t)sources[s].mark;
                find(rings[s], s, sources[s].bonus, node.level, marked + at, MOST_MATCHED - at, fresh);
            }
            // The places that continue, grouped by their next token.
            next.clear(), token_of.clear(), order.clear();
            int64_t longest = INT64_MIN;
            for (const Place& place : fresh) {
                if (place.age <= node.level) continue;
                const int64_t symbol = rings[place.source].symbol(place.age - node.level);
                const int64_t token = symbol & rings[place.source].text.token_mask;
                if (symbol - token != sources[place.source].mark) continue;  // a text of another mark, or a boundary
                order.push_back((int64_t)next.size());
                next.push_back(place), token_of.push_back(token);
                longest = std::max(longest, place.length);
            }
            auto near = [&](int64_t i) { return next[i].length >= longest - REACH; };
            order.erase(std::remove_if(order.begin(), order.end(), [&](int64_t i) { return !near(i); }), order.end());
            std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
                return token_of[a] != token_of[b] ? token_of[a] < token_of[b] : a < b;
            });
            auto weight = [&](int64_t i) { return std::ldexp(1.0, (int)(2 * (next[i].length - longest))); };
            double total = 0;
            int64_t distinct = 0;
            for (size_t i = 0; i < order.size(); i++) {
                total += weight(order[i]);
                distinct += !i || token_of[order[i]] != token_of[order[i - 1]];
            }
            const double reached = (double)(longest + node.level);
            total += DOUBT * (double)distinct / (reached * std::sqrt(reached));
            for (size_t i = 0, end; i < order.size(); i = end) {
                double sum = 0;
                const int64_t token = token_of[order[i]];
                for (end = i; end < order.size() && token_of[order[end]] == token; end++) sum += weight(order[end]);
                const double chance = node.chance * (sum / total);
                if (chance < least) continue;
                heap.push_back({chance, parent, token, node.level + 1, (int64_t)places.size(), (int64_t)(end - i)});
                for (size_t j = i; j < end; j++) places.push_back(next[order[j]]);
                std::push_heap(heap.begin(), heap.end());
            }
        }
        if (heap.empty() || made == nodes) return made;
        std::pop_heap(heap.begin(), heap.end());
        node = heap.back();
        heap.pop_back();
        parent = made;
        tokens[made] = node.token;
        parents[made] = node.parent;
        scores[made++] = node.chance;
    }
}
