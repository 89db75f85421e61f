// What is drawn from joint distributions of beams, where few cells (beam, token) can be: `search.dsbd.joint` and
// `search.dsbd.verify`, in one call for each layer.
//
// Cells are in ascending order. Numbers are those of Python, but for the last bit of sums that it rounds once.

#include "../unfused.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "../operators.h"

#include "../vectors.h"

namespace {

constexpr double NOTHING = 1e-9;       // probability left at which drawing without replacement stops
constexpr double REACHED = 1 - 1e-12;  // share of top-p at which it is reached, whichever way sums were rounded

double total_of(const std::vector<double>& x) {
    long double sum = 0;
    for (const double part : x) sum += part;
    return double(sum);
}

uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

// `engine.sampling.Uniforms`.
struct Numbers {
    uint32_t one = 0x9E3779B9, two = 0x5BD1E995, i = 0;

    Numbers(int64_t seed, int64_t stream, int64_t position) {
        for (const int64_t word : {seed, seed >> 32, stream, position}) {
            const uint32_t before = one;
            one = mix(one + uint32_t(word));
            two = mix((two ^ uint32_t(word)) * 5 + before);
        }
    }
    double next() { return (mix(mix(i++ ^ one) + two) + 0.5) / 4294967296.0; }
};

// Independent draws: for each number the first place where the cumulative sum exceeds it.
void pick(const double* probs, int64_t size, int64_t draws, Numbers& numbers, std::vector<int64_t>& out) {
    std::vector<double> sums(size);
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sums[i] = sum += probs[i];
    for (int64_t i = 0; i < draws; i++)
        out.push_back(std::upper_bound(sums.begin(), sums.end(), numbers.next() * sum) - sums.begin());
}

// p', what is left of p after rejections, see `search.dsbd.verify.Rest`.
struct Rest {
    const double *p, *q;
    int64_t size;
    double whole, s, total;
    std::vector<int64_t> spared;

    Rest(const double* p, const double* q, int64_t size) : p(p), q(q), size(size) {
        long double sum = 0;
        for (int64_t x = 0; x < size; x++) sum += p[x];
        whole = total = double(sum), s = 0;
    }
    void reset(const std::vector<int64_t>& cells) { s = 0, total = whole, spared = cells; }
    double at(int64_t x) const { return std::max(0.0, p[x] - s * q[x]); }
    double reject(double mass) {
        const double more = s + total / mass, before = total;
        long double sum = 0;
        for (int64_t x = 0; x < size; x++)
            if (p[x] > more * q[x]) sum += p[x] - more * q[x];
        double left = double(sum);
        for (const int64_t x : spared) left += std::min(p[x], more * q[x]);
        if (left > 0) s = more, total = left;
        return left / before;
    }
    std::vector<double> probabilities() const {
        std::vector<double> left(size);
        for (int64_t x = 0; x < size; x++) left[x] = at(x);
        for (const int64_t x : spared) left[x] = p[x];
        return left;
    }
};

// Equations (2), (3) and (7): the largest number of drafts of which at least so many are accepted with a probability of
// at least `threshold`. Alphas are the chances that a draft is accepted after all before it were rejected.
int64_t dynamic_width(const std::vector<double>& alphas, double threshold) {
    std::vector<double> first, none{1};  // that the m-th is the first to be accepted; that none of m is
    for (const double alpha : alphas) {
        first.push_back(alpha * none.back());
        none.push_back(none.back() * (1 - alpha));
    }
    std::vector<double> counts = none;  // that k of m drafts are accepted, m = k, k + 1, ...
    double at_least = 1;
    int64_t widest = 0;
    for (size_t k = 0; k <= alphas.size() && at_least >= threshold - 1e-9; k++) {
        widest = k;
        at_least -= counts.back();
        std::vector<double> next(counts.size() - 1);
        for (size_t m = 0; m < next.size(); m++)
            for (size_t j = 0; j <= m; j++) next[m] += first[j] * counts[m - j];
        counts = std::move(next);
    }
    return widest;
}

struct Scored {
    double score;  // of one copy
    int64_t cell;
    double logp;
    int64_t copies;  // that stay
    double mass;     // of one copy
};

// What is known of the row after a beam: its greatest log-probabilities, best first, and their tokens; or all of it.
struct Row {
    double offset;
    int64_t node, count;  // entries of the list
    int64_t size;         // of what is known
    const double* logps;  // and tokens; null: all is known
    bool whole, massed;   // there are no others; its mass is not 1
    const float* logp_V;  // all of it
    const double* peaks;  // the largest of each block of that; may be null

    // The logarithm of its mass at a temperature.
    double log_mass(double temperature) const {
        if (!massed) return 0;
        if (logps) return logps[2 * size];
        const float top = *std::max_element(logp_V, logp_V + size);
        return std::log(mass_of(logp_V, size, top, LOG2_E / temperature)) + top / temperature;
    }
};

// Cells among which the k best are, of rows of which the best are known. False if that cannot be told.
bool gather_known(const std::vector<Row>& rows, int64_t vocab, int64_t k, std::vector<Scored>& found, bool& whole) {
    double bound = -INFINITY;  // of what is not known
    for (const Row& row : rows)
        if (!row.whole) bound = std::max(bound, row.size ? row.offset + row.logps[row.size - 1] : INFINITY);
    if (bound == INFINITY) return false;
    for (const Row& row : rows)
        for (int64_t i = 0; i < row.size && row.offset + row.logps[i] > bound; i++)
            found.push_back({row.offset + row.logps[i], row.node * vocab + int64_t(row.logps[row.size + i]),
                             row.logps[i], row.count});
    whole = bound == -INFINITY;
    return whole || int64_t(found.size()) >= k;
}

// The same of rows that are all there, and more of their cells; blocks with small peaks are not looked at.
void gather_dense(const std::vector<Row>& rows, int64_t vocab, int64_t k, std::vector<Scored>& found, bool& whole) {
    constexpr float ROUNDING = 1e-5;
    const int64_t size = rows[0].size, blocks = (size + SPAN - 1) / SPAN;
    std::vector<float> peaks(rows.size() * blocks), ranked;
    for (size_t r = 0; r < rows.size(); r++) {
        const Row& row = rows[r];
        for (int64_t b = 0; row.peaks && b < blocks; b++) peaks[r * blocks + b] = row.offset + row.peaks[b];
        for (int64_t b = 0; !row.peaks && b < blocks; b++) {
            const float* from = row.logp_V + b * SPAN;
            peaks[r * blocks + b] = row.offset + *std::max_element(from, std::min(from + SPAN, row.logp_V + size));
        }
    }
    float least = -INFINITY;  // hardly more than that of the k best
    if (int64_t(peaks.size()) >= k) least = about_largest(ranked = peaks, k);
    whole = least == -INFINITY;
    if (!whole) least -= ROUNDING * (1 + std::fabs(least));
    struct Block {
        const Row* row;
        int64_t at, size;
    };
    std::vector<Block> near;
    each(peaks.size(), [&](int64_t i, auto n) {
        uint32_t bits = bits_of(load(peaks.data() + i, n) >= least) & ((uint64_t(1) << n) - 1);
        for (; bits; bits &= bits - 1) {
            const int64_t block = i + __builtin_ctz(bits), at = block % blocks * SPAN;
            near.push_back({&rows[block / blocks], at, std::min(SPAN, size - at)});
            for (int64_t j = 0; j < near.back().size; j += 16) __builtin_prefetch(near.back().row->logp_V + at + j);
        }
    });
    for (const Block& block : near) {
        const Row& row = *block.row;
        const float bar = least - row.offset;
        each(block.size, [&](int64_t i, auto n) {
            const float* from = row.logp_V + block.at + i;
            uint32_t bits = bits_of(load(from, n) >= bar) & ((uint64_t(1) << n) - 1);
            for (; bits; bits &= bits - 1) {
                const int lane = __builtin_ctz(bits);
                if (from[lane] > -INFINITY)
                    found.push_back(
                        {row.offset + from[lane], row.node * vocab + block.at + i + lane, from[lane], row.count});
            }
        });
    }
}

double total_of(const std::vector<Scored>& cells) {
    long double sum = 0;
    for (const Scored& cell : cells) sum += cell.copies * cell.mass;
    return double(sum);
}

// Cuts cells to those that have the first k places, and their equals; then to the copies that make up top-p. False if
// more may be drawn.
bool warp(const std::vector<Row>& rows, double temperature, int64_t top_k, double top_p, bool whole,
          std::vector<Scored>& ranked) {
    const int64_t k = temperature == 0 ? 1 : top_k;
    std::sort(ranked.begin(), ranked.end(), [](const Scored& a, const Scored& b) {
        return a.score > b.score || (a.score == b.score && a.cell > b.cell);
    });
    if (k) {
        int64_t places = 0;
        size_t last = 0;  // the cell that has the k-th place
        while ((places += ranked[last].copies) < k && last + 1 < ranked.size()) last++;
        const double least = ranked[last].score;
        while (ranked.back().score < least) ranked.pop_back();
    }
    if (temperature == 0) ranked.erase(ranked.begin(), ranked.end() - 1);  // the first of equals
    const double T = temperature == 0 ? 1 : temperature, best = ranked[0].score;
    for (Scored& cell : ranked) cell.mass = std::exp((cell.score - best) / T);
    if (top_p == 1) return whole || k;
    double total = total_of(ranked);
    if (!whole && !k) {
        std::vector<double> all;
        for (const Row& row : rows) all.push_back(row.count * std::exp((row.offset - best) / T + row.log_mass(T)));
        total = total_of(all);
    }
    const double limit = top_p * total * REACHED;
    double before = 0;  // a copy stays if those before it do not reach top-p
    size_t kept = 0;
    for (; kept < ranked.size() && before < limit; kept++) {
        Scored& cell = ranked[kept];
        if (before + cell.copies * cell.mass > limit)
            cell.copies = std::min(cell.copies, int64_t(std::ceil((limit - before) / cell.mass)));
        before += cell.copies * cell.mass;
    }
    ranked.resize(kept);
    return whole || k || before >= limit;
}

}  // namespace

// The cells that p_beam, warped, leaves: `search.dsbd.joint.Reader._leaders`. Count is -1 if more may be drawn than can be
// told here, or more than there is room for.
//
// Of each beam its log-probability; and six places: its node; its entries; the address of what is known of its row, how
// many log-probabilities that is, WHOLE, MASSED or DENSE, the address of the peaks.
extern "C" void coppice_leaders(int64_t beams, const double* logprobs, const int64_t* places, int64_t vocab,
                                double temperature, int64_t top_k, double top_p, int64_t room, double* probs,
                                double* logps, int64_t* cells, int64_t* count) {
    constexpr int64_t NUCLEUS[] = {32, 256, 1024};  // cells that are looked at for top-p
    constexpr int64_t SMALL = 64;                   // vocabularies no larger are known whole, as in `search.dsbd.joint`
    enum { WHOLE = 1, MASSED = 2, DENSE = 4 };      // as in __init__.py
    *count = -1;
    const double best = *std::max_element(logprobs, logprobs + beams);
    std::vector<Row> rows;
    int64_t dense = 0;
    for (int64_t b = 0; b < beams; b++, places += 6) {
        const bool all = places[4] & DENSE;
        rows.push_back({logprobs[b] - best, places[0], places[1], places[3], all ? nullptr : (const double*)places[2],
                        bool(places[4] & WHOLE), bool(places[4] & MASSED), (const float*)places[2],
                        (const double*)places[5]});
        dense += all;
    }
    if (dense && dense < beams) return;
    const int64_t k = temperature == 0 ? 1 : top_k;
    if (dense && !k && top_p == 1 && rows[0].size > SMALL) return;
    std::vector<Scored> ranked;
    bool told = false, whole = false;
    if (!dense) {
        told = gather_known(rows, vocab, std::max<int64_t>(k, 1), ranked, whole) && !ranked.empty() &&
               warp(rows, temperature, top_k, top_p, whole, ranked);
    } else {
        for (const int64_t nucleus : NUCLEUS) {
            ranked.clear();
            gather_dense(rows, vocab, k ? k : top_p < 1 ? nucleus : INT64_MAX / 8, ranked, whole);
            told = !ranked.empty() && warp(rows, temperature, top_k, top_p, whole, ranked);
            if (told || k || whole) break;
        }
    }
    if (!told || int64_t(ranked.size()) > room) return;
    const double total = total_of(ranked);
    std::sort(ranked.begin(), ranked.end(), [](const Scored& a, const Scored& b) { return a.cell < b.cell; });
    for (size_t i = 0; i < ranked.size(); i++)
        probs[i] = ranked[i].copies * ranked[i].mass / total, logps[i] = ranked[i].logp, cells[i] = ranked[i].cell;
    *count = ranked.size();
}

// `search.dsbd.verify.draw`.
extern "C" void coppice_draw(const double* probs, int64_t size, int64_t n, int64_t iid, int64_t seed, int64_t stream,
                             int64_t position, int64_t* out, int64_t* count) {
    Numbers numbers(seed, stream, position);
    std::vector<int64_t> drawn, more;
    if (iid) {
        pick(probs, size, n, numbers, drawn);
    } else {
        std::vector<double> left(probs, probs + size);
        do {
            more.clear();
            pick(left.data(), size, n, numbers, more);
            for (const int64_t x : more)
                if (std::find(drawn.begin(), drawn.end(), x) == drawn.end()) drawn.push_back(x);
            for (const int64_t x : drawn) left[x] = 0;
        } while (int64_t(drawn.size()) < n && total_of(left) >= NOTHING);
        drawn.resize(std::min<int64_t>(n, drawn.size()));
    }
    std::copy(drawn.begin(), drawn.end(), out);
    *count = drawn.size();
}

// `search.dsbd.DSBD.judge`. Out: the width, drafts accepted, drafts tried, and as many entries as the width says.
extern "C" void coppice_judge(int64_t p_size, const int64_t* p_cells, const double* p, int64_t q_size,
                              const int64_t* q_cells, const double* q_all, int64_t drafts, const int64_t* drawn,
                              int64_t parents, const int64_t* nodes, int64_t vocab, int64_t iid, int64_t fixed_width,
                              int64_t draft_beams, int64_t min_width, double threshold, int64_t room, int64_t seed,
                              int64_t stream, int64_t position, int64_t* out) {
    std::vector<double> q(p_size);
    std::vector<int64_t> place(q_size, -1);  // of q's cells in p
    std::vector<bool> there(q_size);         // their parents are
    long double sum = 0;
    for (int64_t y = 0; y < q_size; y++) {
        const int64_t x = std::lower_bound(p_cells, p_cells + p_size, q_cells[y]) - p_cells;
        if (x < p_size && p_cells[x] == q_cells[y]) place[y] = x, q[x] = q_all[y];
        there[y] = std::find(nodes, nodes + parents, q_cells[y] / vocab) != nodes + parents;
        if (there[y]) sum += q_all[y];
    }
    const double mass = double(sum);
    std::vector<int64_t> tries;  // of q's cells
    for (int64_t j = 0; j < drafts; j++)
        if (there[drawn[j]]) tries.push_back(drawn[j]);

    Rest rest(p, q.data(), p_size);
    int64_t width = fixed_width;
    if (!width) {
        std::vector<double> alphas(iid ? tries.size() : draft_beams);
        for (double& alpha : alphas) alpha = 1 - rest.reject(iid ? mass : 1.0);
        width = std::max(min_width, dynamic_width(alphas, threshold));
        rest.reset({});
    }
    width = std::min(width, room);

    Numbers numbers(seed, stream, position);
    std::vector<int64_t> spent, entries;
    double left = mass;
    int64_t tried = 0;
    for (const int64_t y : tries) {
        if (int64_t(entries.size()) == width) break;
        tried++;
        const int64_t x = place[y];
        left = std::max(left, q_all[y]);
        const bool good = x >= 0 && numbers.next() * q_all[y] * rest.total < rest.at(x) * left;
        if (!good) rest.reject(left);
        if (!iid) {
            left -= q_all[y];
            if (x >= 0) spent.push_back(x);
        }
        if (good) {
            entries.push_back(x);
            rest.reset(spent);
        }
    }
    out[0] = width, out[1] = entries.size(), out[2] = tried;
    if (int64_t(entries.size()) < width) {
        pick(rest.probabilities().data(), p_size, 1, numbers, entries);
        pick(p, p_size, width - entries.size(), numbers, entries);
    }
    std::copy(entries.begin(), entries.end(), out + 3);
}
