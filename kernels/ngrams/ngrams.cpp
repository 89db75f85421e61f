// Drafts from n-grams: `search.aded.drafters.Backoff`, number for number, in one call for each draft.
//
// Every sum has the order it has there, and no product is fused with a sum, so that equal chances stay equal.

#include "../unfused.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "../operators.h"

namespace {

constexpr int BITS = 21;
constexpr uint64_t ONE = (uint64_t(1) << BITS) - 1, TWO = (uint64_t(1) << 2 * BITS) - 1;
constexpr uint64_t ORDERS[] = {(uint64_t(1) << 3 * BITS) - 1, TWO, ONE};
constexpr size_t SUCCESSORS = 12;       // of a token that a store is asked for
constexpr size_t REMEMBERED = 1 << 16;  // contexts whose successors in a store are kept at hand

struct Entry {
    int64_t token;
    double weight;
};
using Entries = std::vector<Entry>;

// Values by context, which is never 0, side by side: after a pass of the model each look costs a wait for memory, so
// what will be looked up is fetched ahead.
template <typename Value>
class Table {
    struct Slot {
        uint64_t context = 0;
        Value value;
    };
    std::vector<Slot> slots = std::vector<Slot>(16);  // a power of two, at most half of them in use
    size_t used = 0;

    // Where to look first: a context's digits are spread over all bits.
    size_t first(uint64_t context) const { return context * 0x9E3779B97F4A7C15 >> 32 & (slots.size() - 1); }

    Slot& slot(uint64_t context) {
        size_t i = first(context);
        while (slots[i].context && slots[i].context != context) i = (i + 1) & (slots.size() - 1);
        return slots[i];
    }

  public:
    void fetch(uint64_t context) const { __builtin_prefetch(&slots[first(context)]); }

    // Null if there is none.
    Value* find(uint64_t context) {
        Slot& found = slot(context);
        return found.context ? &found.value : nullptr;
    }

    // A new one, if there is none; the others may move.
    Value& at(uint64_t context) {
        if (Slot& found = slot(context); found.context) return found.value;
        if (2 * ++used > slots.size()) {
            std::vector<Slot> old(2 * slots.size());
            old.swap(slots);
            for (Slot& from : old)
                if (from.context) slot(from.context) = std::move(from);
        }
        Slot& made = slot(context);
        made.context = context;
        return made.value;
    }

    size_t size() const { return used; }

    void clear() { *this = {}; }
};

Entry* find(Entries& entries, int64_t token) {
    for (Entry& entry : entries)
        if (entry.token == token) return &entry;
    return nullptr;
}

bool likelier(const Entry& a, const Entry& b) { return std::tie(b.weight, a.token) < std::tie(a.weight, b.token); }

// What a store says of the tokens after a context: chances, likeliest first, and what they leave to others.
struct Known {
    Entries chances;
    double left;
};

// Tri-grams of a file, ascending, and how often each occurred (see `search.aded.ngrams`).
struct Store {
    const int64_t* keys;
    const int32_t* counts;
    int64_t size;
    double doubt;
    Table<Known> known;

    std::pair<int64_t, int64_t> range(uint64_t first, uint64_t end) const {
        const int64_t* from = std::lower_bound(keys, keys + size, int64_t(first));
        return {from - keys, std::lower_bound(from, keys + size, int64_t(end)) - keys};
    }

    // Of one or two tokens.
    const Known& after(uint64_t context) {
        if (Known* there = known.find(context)) return *there;
        const uint64_t before = context >> BITS, last = (context & ONE) - 1;
        Entries found;
        double total = 0;
        if (before) {
            const uint64_t pair = ((before - 1) << BITS | last) << BITS;
            const auto [from, end] = range(pair, pair + ONE + 1);
            for (int64_t i = from; i < end; i++) {
                total += counts[i];
                if ((uint64_t(keys[i]) & ONE) != ONE) found.push_back({keys[i] & int64_t(ONE), double(counts[i])});
            }
            std::sort(found.begin(), found.end(), likelier);
        } else {
            const auto [from, end] = range(last << 2 * BITS, (last + 1) << 2 * BITS);
            for (int64_t i = from; i < end; i++) {
                const int64_t token = keys[i] >> BITS & int64_t(ONE);
                if (found.empty() || found.back().token != token) found.push_back({token, 0});
                found.back().weight += counts[i];
                total += counts[i];
            }
            const size_t kept = std::min(found.size(), SUCCESSORS);
            std::partial_sort(found.begin(), found.begin() + kept, found.end(), likelier);
            found.resize(kept);
        }
        const double share = 1 / (total + doubt * double(1 + found.size()));
        for (Entry& entry : found) entry.weight = share * entry.weight;
        if (known.size() >= REMEMBERED) known.clear();
        return known.at(context) = {std::move(found), 1 - share * total};
    }
};

struct Node {
    double chance;
    int64_t parent, token, level;
    uint64_t context;
    bool operator<(const Node& other) const {  // the likeliest is the largest, then the older parent, the lower token
        return std::tie(chance, other.parent, other.token) < std::tie(other.chance, parent, token);
    }
};

// What one request knows.
struct Text {
    Store* store;  // or null
    double doubt, floor;
    size_t kept;
    bool adapt;
    uint64_t context = 0;
    Table<Entries> seen;
    std::vector<uint64_t> contexts;  // of the last draft's nodes
    Entries chances, added;
    std::vector<Node> heap;
    std::vector<double> best;

    uint64_t on(uint64_t from, int64_t token) const { return (from << BITS | uint64_t(token + 1)) & ORDERS[0]; }

    void count(uint64_t from, const Entries& entries) {
        uint64_t last = 0;
        for (uint64_t mask : ORDERS) {
            const uint64_t part = from & mask;
            if (part == last) continue;
            last = part;
            Entries& known = seen.at(part);
            if (known.empty()) {
                known = entries;
                continue;
            }
            for (const Entry& entry : entries) {  // the latest last
                double weight = 0;
                if (Entry* old = find(known, entry.token)) {
                    weight = old->weight;
                    known.erase(known.begin() + (old - known.data()));
                }
                known.push_back({entry.token, weight + entry.weight});
            }
            if (known.size() > 2 * kept) {
                std::reverse(known.begin(), known.end());
                std::stable_sort(known.begin(), known.end(),
                                 [](const Entry& a, const Entry& b) { return a.weight > b.weight; });
                known.resize(kept);
                std::reverse(known.begin(), known.end());
            }
        }
    }

    // Adds shares to chances, but for those that even with all that is `left` would not come to `least`.
    void add(const Entries& after, double share, double left, double least) {
        const double enough = (least - left) / share;
        const size_t before = chances.size();
        for (const Entry& entry : after) {
            size_t i = 0;
            while (i < before && chances[i].token != entry.token) i++;
            if (i < before)
                chances[i].weight += share * entry.weight;
            else if (entry.weight >= enough)
                chances.push_back({entry.token, share * entry.weight});
        }
    }

    // Chances of the tokens after a context, into `chances`; those that are below `least` may be missing.
    void mix(uint64_t from, double least) {
        chances.clear();
        double left = 1;
        uint64_t last = 0;
        for (uint64_t mask : ORDERS) {
            const uint64_t part = from & mask;
            if (part == last) continue;
            last = part;
            if (const Entries* found = seen.find(part)) {
                const Entries& counts = *found;
                const double doubted = doubt + doubt * double(counts.size());
                double total = 0;
                for (const Entry& entry : counts) total += entry.weight;
                const double share = left / (total + doubted);
                left = share * doubted;
                add(counts, share, left, least);
            }
            if (store && part <= TWO) {
                const Known& known = store->after(part);
                const double share = left;
                left *= known.left;
                add(known.chances, share, left, least);
            }
            if (left < least && chances.empty()) return;
        }
    }

    // What is known after a context will be asked for soon.
    void fetch(uint64_t from) const {
        for (uint64_t mask : ORDERS) {
            seen.fetch(from & mask);
            if (store && mask <= TWO) store->known.fetch(from & mask);
        }
    }

    int64_t draft(int64_t nodes, int64_t depth, int64_t* tokens, int64_t* parents, double* scores) {
        contexts.clear(), heap.clear();
        best.assign(nodes, floor);  // heap of the chances of the likeliest found: below all of them is no draft
        Node at{1, 0, 0, 0, context};
        fetch(context);
        for (int64_t place = -1;; contexts.push_back(at.context)) {
            if (!heap.empty()) fetch(heap.front().context);
            if (at.level < depth && place + 1 < nodes) {
                mix(at.context, best.front() / at.chance * (1 - 1e-9));  // equals stay, however they are rounded
                for (const Entry& entry : chances) {
                    const double chance = at.chance * entry.weight;
                    if (chance < best.front()) continue;
                    std::pop_heap(best.begin(), best.end(), std::greater<>());
                    best.back() = chance;
                    std::push_heap(best.begin(), best.end(), std::greater<>());
                    heap.push_back({chance, place, entry.token, at.level + 1, on(at.context, entry.token)});
                    std::push_heap(heap.begin(), heap.end());
                }
            }
            place++;
            if (heap.empty() || place == nodes) return place;
            std::pop_heap(heap.begin(), heap.end());
            at = heap.back();
            heap.pop_back();
            tokens[place] = at.token, parents[place] = at.parent, scores[place] = at.chance;
        }
    }
};

}  // namespace

extern "C" {

void coppice_ngrams_store(void** made, const int64_t* keys, const int32_t* counts, int64_t size, float doubt) {
    *made = new Store{keys, counts, size, doubt, {}};
}

void coppice_ngrams_text(void** made, void* store, float doubt, float floor, int64_t kept, int64_t adapt) {
    *made = new Text{(Store*)store, doubt, floor, size_t(kept), adapt != 0};
}

void coppice_ngrams_close_store(void* store) { delete (Store*)store; }

void coppice_ngrams_close_text(void* text) { delete (Text*)text; }

void coppice_ngrams_learn(void* of, const int64_t* tokens, int64_t n) {
    Text* text = (Text*)of;
    for (int64_t i = 0; i < n; i++) {
        if (text->adapt) text->count(text->context, {{tokens[i], 1}});
        text->context = text->on(text->context, tokens[i]);
    }
}

// `told`: of each node k log-probabilities and k tokens, NaN where there are no more.
void coppice_ngrams_observe(void* of, const int64_t* nodes, const double* told, int64_t n, int64_t k) {
    Text* text = (Text*)of;
    for (int64_t i = 0; i < n; i++) text->fetch(nodes[i] < 0 ? text->context : text->contexts[nodes[i]]);
    for (int64_t i = 0; i < n; i++, told += 2 * k) {
        text->added.clear();
        for (int64_t j = 0; j < k && told[k + j] == told[k + j]; j++)
            text->added.push_back({int64_t(told[k + j]), std::exp(told[j])});
        if (!text->added.empty()) text->count(nodes[i] < 0 ? text->context : text->contexts[nodes[i]], text->added);
    }
}

void coppice_ngrams_draft(void* of, int64_t nodes, int64_t depth, int64_t* tokens, int64_t* parents, double* scores,
                          int64_t* found) {
    *found = ((Text*)of)->draft(nodes, depth, tokens, parents, scores);
}

// Chances after the text and `ahead`: as many as there is room for are written, `found` says how many there are.
void coppice_ngrams_chances(void* of, const int64_t* ahead, int64_t n, int64_t* tokens, double* chances, int64_t room,
                            int64_t* found) {
    Text* text = (Text*)of;
    uint64_t context = text->context;
    for (int64_t i = 0; i < n; i++) context = text->on(context, ahead[i]);
    text->mix(context, 0);
    *found = int64_t(text->chances.size());
    for (int64_t i = 0; i < std::min(room, *found); i++)
        tokens[i] = text->chances[i].token, chances[i] = text->chances[i].weight;
}
}
