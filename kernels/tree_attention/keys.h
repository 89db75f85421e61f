// Which keys a token sees, in blocks of BLOCK positions. A row's keys are added up block by block and, in a block, by
// position, wherever they lie: so its result depends neither on what is trunk and what a branch, nor on other rows.
//
//     positions   0 ..... 31 | 32 ..... 63 | 64 ..... 95 | 96 .....       trunk of 70 tokens
//     all rows    trunk      | trunk       |             |
//     each token                           | t70 a b ... | c ...          its own: the trunk's end and its branch
//
// Blocks that only the trunk has are read once for all rows of a tile. From the block on in which a token's branch
// begins its blocks are its own.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../operators.h"

namespace {

constexpr int BLOCK = 32;  // positions between two updates of the largest score
static_assert(BLOCK == 32, "uint32_t has a bit for each");

// Those of a block's positions of which a token sees keys, a bit for each, and their slots.
struct OwnBlock {
    int32_t number;  // of the block: positions number * BLOCK and on
    uint32_t there;
    int32_t slots[BLOCK];  // as numbers of 32 bits, which runs of a trunk are
};

// What a token sees: trunk positions oldest .. shared - 1, and then its own blocks first .. last - 1, in order; all
// positions are below `end`.
struct Token {
    int32_t oldest, shared, first, last;
    int64_t end;
};

class Keys {
  public:
    explicit Keys(const Attention& p) : p(p), pieces(p.trees), tokens(p.starts[p.trees]) {
        std::vector<int64_t> lengths(p.trees);
        for (const int32_t* run = p.runs; run < p.runs + 3 * p.run_count; run += 3) {
            pieces[run[0]].push_back({lengths[run[0]], run[1]});
            lengths[run[0]] += run[2];
        }
        for (int r = 0; r < p.trees; r++) {
            pieces[r].push_back({lengths[r], 0});
            for (int t = p.starts[r]; t < p.starts[r + 1]; t++) add(r, t);
        }
    }

    const Token& operator[](int token) const { return tokens[token]; }
    const OwnBlock* own(int number) const { return &blocks[number]; }

    // Writes the slots of trunk positions first .. last - 1.
    void trunk_slots(int tree, int64_t first, int64_t last, int32_t* slots) const {
        const std::vector<Piece>& all = pieces[tree];
        auto after = [](int64_t position, const Piece& piece) { return position < piece.first; };
        auto piece = std::upper_bound(all.begin(), all.end(), first, after);
        for (int64_t at = first; at < last; piece++)
            for (int64_t end = std::min(last, piece->first); at < end; at++)
                *slots++ = piece[-1].slot + (at - piece[-1].first);
    }

  private:
    // A run of a trunk; the last one of a tree says where the trunk ends.
    struct Piece {
        int64_t first;  // position
        int32_t slot;
    };

    const Attention& p;
    std::vector<std::vector<Piece>> pieces;
    std::vector<Token> tokens;
    std::vector<OwnBlock> blocks;
    std::vector<std::pair<int64_t, int32_t>> branch;  // of a token: positions and slots
    std::vector<int32_t> slots;                       // likewise, of the end of the trunk

    void add(int tree, int t) {
        const int oldest = p.window < 0 ? 0 : std::max<int64_t>(0, p.positions[t] - p.window + 1), seen = p.seen[t];
        const int count = blocks.size();
        read_branch(tree, t, oldest);
        int64_t shared = seen;
        if (!branch.empty()) shared = std::min<int64_t>(seen, branch[0].first / BLOCK * BLOCK);
        tokens[t] = {oldest, int32_t(shared), count, count, shared > oldest ? shared : 0};
        if (branch.empty()) return;
        const int64_t from = std::max<int64_t>(shared, oldest);
        slots.resize(std::max<int64_t>(0, seen - from));
        trunk_slots(tree, from, seen, slots.data());
        for (size_t i = 0; i < slots.size(); i++) put(count, from + i, slots[i]);
        for (const auto& [position, slot] : branch) put(count, position, slot);
        tokens[t].last = blocks.size();
        tokens[t].end = std::max<int64_t>(seen, branch.back().first + 1);
    }

    // The branch slots that a token sees, by position.
    void read_branch(int tree, int t, int oldest) {
        branch.clear();
        for (int c = 0; c < p.words; c++)
            for (uint32_t word = p.ancestry[t * p.words + c]; word; word &= word - 1) {
                const int64_t column = tree * p.table_width + 32 * c + __builtin_ctz(word);
                const int64_t position = std::max(0, p.branch_positions[column]);
                if (position >= oldest) branch.emplace_back(position, p.branch_slots[column]);
            }
        if (!std::is_sorted(branch.begin(), branch.end())) std::sort(branch.begin(), branch.end());
    }

    // Adds a key to the blocks from `first` on. One at the position of another, as no tree has it, gets a block again.
    void put(int first, int64_t position, int32_t slot) {
        const int32_t number = position / BLOCK, lane = position % BLOCK;
        if (int(blocks.size()) == first || blocks.back().number != number || blocks.back().there >> lane & 1)
            blocks.push_back({number, 0, {}});
        blocks.back().there |= uint32_t(1) << lane;
        blocks.back().slots[lane] = slot;
    }
};

}  // namespace
