
"use strict";
// The page shows one request at one step. The element #data has the engine's record (docs/tree.md describes it).
// A tree is drawn on a canvas of the size of its window, the visible part only. A few elements beside the canvas describe
// the chosen node and its neighbours to a screen reader.

const byId = id => document.getElementById(id);
const file = JSON.parse(byId("data").textContent);
const CALM = matchMedia("(prefers-reduced-motion: reduce)");
const DARK = matchMedia("(prefers-color-scheme: dark)");
const FONT = '"DejaVu Sans", system-ui, sans-serif';
const CELL = 22, ROW = 28, GAP = 22, WIDEST = 150, TEXTLESS = 0.5;  // pixels at size 1; below TEXTLESS cells are blank
const NEAREST = 24;  // most siblings, and most children, of the chosen node that a screen reader gets

const STATES = {  // states of a node at a step: words, sign
  trunk: ["in the trunk", ""],
  live: ["live, evaluated", ""],
  frontier: ["grown, not evaluated", ""],
  draft: ["drafted, to be verified", "?"],
  accepted: ["draft accepted now", "✓"],
  rejected: ["draft rejected now", "✕"],
  dropped: ["dropped now", ""],
  gone: ["gone", ""],
  end: ["reported by the search, not evaluated", "■"],
};

// --- the record ---

class Tree {
  /** One tree of a request: a row per node; a child's id is greater than its parent's. Tokens of candidates and outputs
   * that were never grown are added as nodes. */
  constructor(request, index) {
    Object.assign(this, structuredClone(request.trees[index]));
    this.index = index;
    this.texts = request.texts[this.model] || {};
    this.lastStep = Math.max(0, request.steps.length - 1);
    let certain = 0;  // tokens, by step; those of the first tree
    this.certain = index ? [] : request.steps.map(({settled}) => certain += settled);
    this.real = this.token.length;
    this.known = [...this.born];  // the step at which a node is first shown: born, or reported before
    this.drafts = new Set(this.drafted);
    this.children = this.token.map(() => []);
    this.depth = [0];
    this.total = [0];  // log-probability of the path
    for (let n = 1; n < this.real; n++) this.link(n);
    if (!index) request.steps.forEach((step, at) => step.beams.forEach(([, node, tail]) => this.addEnd(node, tail, at)));
    this.outputNodes = index ? [] : request.outputs.map(o => this.addEnd(o.node, o.tail, this.lastStep));
    // The line of a branch follows the child that is alive longest; outputs come first.
    this.reach = this.token.map((_, n) => this.alive(n));
    this.size = this.token.map(() => 1);
    for (const n of this.outputNodes.slice().reverse()) {
      const rank = this.outputNodes.indexOf(n);
      for (let m = n; m > 0; m = this.parent[m]) this.reach[m] = this.lastStep + 2 + this.outputNodes.length - rank;
    }
    for (let n = this.token.length - 1; n > 0; n--) {
      const p = this.parent[n];
      this.reach[p] = Math.max(this.reach[p], this.reach[n]);
      this.size[p] += this.size[n];
    }
    const rank = n => this.logp[n] ?? -99;
    for (const list of this.children)
      list.sort((a, b) => this.reach[b] - this.reach[a] || this.size[b] - this.size[a] || rank(b) - rank(a) || a - b);
    this.branch = this.token.map(() => 0);  // the first node of the line that a node is on
    for (let n = 1; n < this.token.length; n++)
      this.branch[n] = this.children[this.parent[n]][0] === n ? this.branch[this.parent[n]] : n;
    this.whole = layout(this, () => true, 0);
    const known = Object.values(this.scores);
    this.scoreRange = known.length ? [Math.min(...known), Math.max(...known)] : null;
  }

  link(n) {
    const p = this.parent[n];
    this.children[p].push(n);
    this.depth[n] = this.depth[p] + 1;
    this.total[n] = this.total[p] === null || this.logp[n] === null ? null : this.total[p] + this.logp[n];
  }

  /** Add tokens reported at a step; returns the node of the last. */
  addEnd(node, tail, step) {
    const gone = step < this.lastStep ? step + 1 : null;
    for (const token of tail) {
      const above = node;
      node = this.children[above].find(n => this.token[n] === token);
      if (node === undefined) {
        node = this.token.length;
        const chance = (this.top[above] || []).find(([other]) => other === token);
        for (const [column, value] of [["token", token], ["parent", above], ["logp", chance ? chance[1] : null],
          ["born", step], ["known", step], ["evaluated", null], ["dropped", gone], ["settled", null], ["accepted", null]])
          this[column].push(value);
        this.children.push([]);
        this.link(node);
      } else if (node >= this.real) {
        this.dropped[node] = gone;
      } else {
        this.known[node] = Math.min(this.known[node], step);  // reported before it was grown, as open nodes of ULTS are
      }
    }
    return node;
  }

  alive(n) { return this.dropped[n] ?? this.lastStep + 1; }

  /** The state of a node at a step; null before it is shown. */
  state(n, step) {
    if (this.known[n] > step) return null;
    if (this.born[n] > step) return "end";
    if (n >= this.real) return this.dropped[n] !== null && this.dropped[n] <= step ? "gone" : "end";
    const dropped = this.dropped[n], accepted = this.accepted[n];
    if (accepted !== null && accepted === step) return "accepted";
    if (dropped !== null && dropped < step) return "gone";
    if (dropped !== null && dropped === step) return this.rejected(n) ? "rejected" : "dropped";
    if (n === 0 || (this.settled[n] !== null && this.settled[n] <= step)) return "trunk";
    if (this.rejected(n) && step === this.lastStep) return "rejected";  // the search ended with it
    if (this.evaluated[n] === null || this.evaluated[n] > step) return "frontier";
    return this.drafts.has(n) && (accepted === null || accepted > step) ? "draft" : "live";
  }

  /** The state of a node in words. Of the trunk, settled is what the search has reported as certain: a finished output
   * may differ from the rest. */
  words(n, step) {
    const state = this.state(n, step);
    const settled = state === "trunk" && n > 0 && this.depth[n] <= (this.certain[step] ?? 0);
    return STATES[state][0] + (settled ? ", settled" : state === "gone" && this.rejected(n) ? ": rejected draft" : "");
  }

  /** Whether a node is a draft that is rejected at some step. */
  rejected(n) { return this.drafts.has(n) && this.accepted[n] === null && this.evaluated[n] !== null; }

  /** The sign of a draft's outcome; "" for other nodes. */
  sign(n, state) {
    if (state === "end" || !this.drafts.has(n)) return state === "end" ? STATES.end[1] : "";
    return STATES[state === "live" || state === "trunk" ? "accepted" : state === "gone" && this.rejected(n) ? "rejected" : state][1];
  }

  signed(n) { return n >= this.real || this.drafts.has(n) || this.known[n] < this.born[n]; }

  /** The trunk's last node at a step. */
  root(step) {
    for (let n = 0; ;) {
      const next = this.children[n].find(c => this.settled[c] !== null && this.settled[c] <= step);
      if (next === undefined) return n;
      n = next;
    }
  }

  text(n) { return n ? this.word(this.token[n]) : this.model === "target" ? "prompt" : "its prompt"; }
  word(token) { return readable(this.texts[token] ?? `#${token}`); }

  path(n, most = 1000) {
    const nodes = [];
    for (; n > 0 && nodes.length < most; n = this.parent[n]) nodes.push(n);
    return nodes.reverse();
  }

  /** The end of the text up to a node. */
  line(n, most = 40) {
    const nodes = this.path(n, most);
    const more = nodes.length && this.parent[nodes[0]] > 0;
    return (more ? "…" : "") + nodes.map(m => this.texts[this.token[m]] ?? `#${this.token[m]}`).join("");
  }

  describe(n, step) {
    const state = this.state(n, step);
    const chance = this.logp[n] === null ? "" : `, probability ${percent(this.logp[n])}`;
    const score = this.scores[n] === undefined ? "" : `, score ${this.scores[n].toFixed(3)}`;
    const list = n ? this.children[this.parent[n]].filter(c => this.known[c] <= step) : [n];
    const below = this.children[n].filter(c => this.known[c] <= step).length;
    const came = n && this.born[n] <= step ? `, came at step ${this.born[n]}` : "";
    const went = this.dropped[n] !== null && this.dropped[n] <= step ? `, dropped at step ${this.dropped[n]}` : "";
    return `${this.text(n)}${chance}${score}, ${state ? this.words(n, step) : "not there yet"}${came}${went}, depth ${this.depth[n]}, ` +
      `${list.indexOf(n) + 1} of ${list.length} siblings, ${below} ${below === 1 ? "child" : "children"}`;
  }

  /** The node of each slot of the pool at a step, and the trunk's pages; none after the tree has ended. */
  owners(step) {
    const slots = new Map(), pages = [];
    if (this.born[0] > step || (this.ended !== null && this.ended <= step)) return {slots, pages, cached: 0};
    for (const [at, slot, node] of this.slots) if (at <= step) slots.set(slot, node);
    const over = at => at !== null && at <= step;
    for (const [slot, node] of slots) if (node < 0 || over(this.dropped[node]) || over(this.settled[node])) slots.delete(slot);
    for (const [at, place, page] of this.pages) if (at <= step) pages[place] = page;
    let cached = 0;
    for (const [at, tokens] of this.cached) if (at <= step) cached = tokens;
    return {slots, pages: pages.filter(page => page >= 0), cached};
  }
}

/** Rows and columns of the nodes below `start` that are `seen`: columns by depth, in an order without crossing lines.
 * The line of a branch keeps its row, moves down when others need the room, and up a row at a time when there is room. */
function layout(tree, seen, start) {
  const row = new Map(), columns = [], stack = [start], base = tree.depth[start];
  while (stack.length) {  // depth first, the best branch first
    const n = stack.pop();
    row.set(n, 0);
    (columns[tree.depth[n] - base] ||= []).push(n);
    stack.push(...tree.children[n].filter(seen).reverse());
  }
  let rows = 1;
  for (const column of columns.slice(1)) {
    let next = 0;
    for (const n of column) {
      const above = row.get(tree.parent[n]), room = above - next;
      row.set(n, room > 2 ? above - 1 : Math.max(next, above));
      next = row.get(n) + 1;
    }
    rows = Math.max(rows, next);
  }
  return {start, row, columns, rows};
}

function readable(text) {  // replaces invisible characters and those that change the direction of text
  const names = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"};
  return text.replace(/[ \t\n\r]|[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Cs}]/gu,
    c => names[c] || `\\u{${c.codePointAt(0).toString(16)}}`) || "∅";
}
function percent(logp) {
  const p = 100 * Math.exp(logp);
  return p >= 99.95 && logp < 0 ? ">99.9%" : p >= 10 ? `${p.toFixed(0)}%` : p >= 0.1 ? `${p.toFixed(1)}%` : p > 0 ? `${p.toExponential(0)}%` : "0%";
}
const figure = x => typeof x !== "number" ? String(x) : Number.isInteger(x) ? x.toLocaleString("en") : x.toPrecision(4);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Make an element; text is never read as HTML. */
function make(name, properties = {}, ...inside) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties))
    key.startsWith("aria") || key === "role" ? element.setAttribute(key, value) : element[key] = value;
  element.append(...inside);
  return element;
}
function tableOf(rows) {
  return make("table", {}, make("tbody", {}, ...rows.filter(row => row[1] !== null && row[1] !== undefined).map(([name, value]) =>
    make("tr", {}, make("th", {scope: "row"}, name), make("td", {}, value)))));
}

