// The keys that each token sees, in blocks of BLOCK positions. A row adds up its keys block by block and, within a
// block, by position, wherever they are stored. Its result therefore depends neither on other rows nor on which tokens
// belong to the trunk and which to a branch.
//
//     positions   0 ..... 31 | 32 ..... 63 | 64 ..... 95 | 96 .....       trunk of 70 tokens
//     all rows    trunk      | trunk       |             |
//     each token                           | t70 a b ... | c ...          own blocks: the trunk's end and the branch
//
// Blocks that hold only trunk tokens are read once for all rows of a tile. From the block in which a token's branch
// begins, each token has its own blocks.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../operators.h"

namespace {

constexpr int BLOCK = 32;  // positions between two updates of the largest score
static_assert(BLOCK == 32, "uint32_t has a bit for each");

// The positions of a block that a token sees, one bit for each, and their slots.
struct OwnBlock {
    int32_t number;  // the block covers positions number * BLOCK .. number * BLOCK + BLOCK - 1
    uint32_t there;
    int32_t slots[BLOCK];  // 32 bits, like the runs of a trunk
};

// The keys that a token sees: trunk positions oldest .. shared - 1, then its own blocks first .. last - 1, in order.
// All positions are below `end`.
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
    // A run of a trunk. The last piece of a tree is empty and marks the end of the trunk.
    struct Piece {
        int64_t first;  // position
        int32_t slot;
    };

    const Attention& p;
    std::vector<std::vector<Piece>> pieces;
    std::vector<Token> tokens;
    std::vector<OwnBlock> blocks;
    std::vector<std::pair<int64_t, int32_t>> branch;  // positions and slots of one token's branch
    std::vector<int32_t> slots;                       // of the trunk's last positions, likewise

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

    // Collects the branch slots that a token sees, sorted by position.
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

    // Adds a key to the blocks from `first` on. A second key at one position, which no tree has, starts another block.
    void put(int first, int64_t position, int32_t slot) {
        const int32_t number = position / BLOCK, lane = position % BLOCK;
        if (int(blocks.size()) == first || blocks.back().number != number || blocks.back().there >> lane & 1)
            blocks.push_back({number, 0, {}});
        blocks.back().there |= uint32_t(1) << lane;
        blocks.back().slots[lane] = slot;
    }
};

}  // namespace
