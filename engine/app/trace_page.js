
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

// --- the view ---

const shown = {request: 0, step: 0, view: "whole", size: 1, tree: 0, node: -1, playing: 0};
let request, trees, panels, counts;

let inks = {};
function ink(name) { return inks[name] ||= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }
const hue = id => `hsl(${(id * 137.508) % 360} ${DARK.matches ? "60% 62%" : "65% 45%"})`;

/** The colour of a node's slot, by the chosen rule. */
function slotInk(tree, n) {
  const kind = byId("owner").value;
  if (kind === "tree") return hue(tree.index + 1);
  if (kind === "branch") return hue(tree.branch[n] + 1);
  return ink(`${tree.state(n, shown.step) || "gone"}-edge`);
}

class Panel {
  /** The window of a tree. */
  constructor(tree, open) {
    this.tree = tree;
    this.canvas = make("canvas");
    this.space = make("div");
    this.items = make("div", {className: "items"});
    this.scroll = make("div", {className: "scroll", tabIndex: 0, role: "tree", "aria-label": `Tree of the ${tree.model} model`}, this.space, this.items);
    this.title = make("button", {"aria-expanded": open, onclick: () => this.toggle()});
    this.element = make("section", {className: open ? "tree open" : "tree"}, this.title, make("div", {className: "view"}, this.canvas, this.scroll));
    this.scroll.addEventListener("scroll", () => { this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.draw(); }); });
    this.scroll.addEventListener("keydown", event => press(event, this));
    this.scroll.addEventListener("focus", () => { if (shown.tree !== tree.index || shown.node < 0) choose(tree.index, this.tip(), {quiet: true}); });
    this.drag();
    new ResizeObserver(() => { if (this.plan) this.draw(); }).observe(this.scroll);
  }

  get open() { return this.element.classList.contains("open"); }
  toggle() { this.title.setAttribute("aria-expanded", this.element.classList.toggle("open")); this.refresh(); }

  refresh() { this.arrange(); this.draw(); this.describe(); }

  /** Lay out the nodes of this step. */
  arrange() {
    const {tree} = this, step = shown.step;
    const before = shown.view === "live" ? tree.root(step - 1) : 0;
    this.plan = shown.view === "live"
      ? layout(tree, n => tree.known[n] <= step && (tree.dropped[n] === null || tree.dropped[n] >= step), before) : tree.whole;
    const size = shown.size;
    this.textless = size < TEXTLESS;
    let x = 10;
    this.x = [];
    this.width = [];
    this.plan.widest ||= this.plan.columns.map((column, d) => d ? Math.min(WIDEST, Math.max(...column.map(n => this.needs(n)))) : 190);
    this.plan.widest.forEach((widest, d) => {
      this.width[d] = this.textless && d ? 14 * size / TEXTLESS : widest * size;
      this.x[d] = x;
      x += this.width[d] + (this.textless ? 8 * size / TEXTLESS : GAP * size);
    });
    this.space.style.width = `${x}px`;
    this.space.style.height = `${this.plan.rows * ROW * size + 20}px`;
    this.element.style.maxHeight = this.open ? `${tree.whole.rows * ROW * size + 78}px` : "";
    const all = tree.real, grown = tree.born.slice(0, all).filter(at => at <= step).length;
    const ended = tree.ended !== null && tree.ended <= step ? `, given back at step ${tree.ended}` : "";
    const open = tree.born[0] <= step ? `${grown} of ${plural(all, "node")}${ended}` : `opened at step ${tree.born[0]}`;
    const twins = trees.filter(other => other.model === tree.model);
    const number = twins.length > 1 ? ` ${twins.indexOf(tree) + 1}` : "";
    this.title.textContent = `${this.open ? "▾" : "▸"} ${tree.model}${number} · ${request.models[tree.model] || ""} · ${open}`;
  }

  /** The width of a cell in pixels at size 1. */
  needs(n) {
    const text = this.tree.text(n), context = this.canvas.getContext("2d");
    if (!widths.has(text)) {
      context.font = `600 12px ${FONT}`;
      widths.set(text, context.measureText(text).width);
    }
    return Math.max(24, widths.get(text)) + (this.tree.signed(n) ? 28 : 16);
  }

  box(n) {
    const d = this.tree.depth[n] - this.tree.depth[this.plan.start], size = shown.size;
    return [this.x[d], 10 + this.plan.row.get(n) * ROW * size, this.width[d], CELL * size];
  }

  has(n) { return this.plan.row.has(n) && this.tree.known[n] <= shown.step; }

  draw() {
    if (!this.open) return;
    const {canvas, scroll, tree, plan} = this, {size, step} = shown;
    const ratio = devicePixelRatio || 1, W = scroll.clientWidth, H = scroll.clientHeight;
    if (canvas.width !== W * ratio || canvas.height !== H * ratio) { canvas.width = W * ratio; canvas.height = H * ratio; }
    canvas.style.width = `${W}px`; canvas.style.height = `${H}px`;
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, W, H);
    if (tree.born[0] > step) return;
    c.translate(-scroll.scrollLeft, -scroll.scrollTop);
    const left = scroll.scrollLeft, right = left + W, top = scroll.scrollTop, bottom = top + H;
    const chosen = new Set(shown.tree === tree.index && shown.node > 0 ? tree.path(shown.node, 1e5) : []);
    const cells = [];
    for (let d = 0; d < plan.columns.length; d++) {
      if (this.x[d] + this.width[d] < left - WIDEST * size || this.x[d] > right + WIDEST * size) continue;
      for (const n of plan.columns[d]) {
        const state = tree.state(n, step);
        if (!state) continue;
        const [x, y, w, h] = this.box(n);
        if (n !== plan.start) this.edge(c, n, state, chosen.has(n), top, bottom);
        if (y + h >= top && y <= bottom) cells.push([n, state, x, y, w, h]);
      }
    }
    for (const [n, state, x, y, w, h] of cells) this.cell(c, n, n === plan.start ? "trunk" : state, x, y, w, h);
    if (shown.tree === tree.index && this.has(shown.node)) {
      const [x, y, w, h] = this.box(shown.node);
      c.lineWidth = 3; c.strokeStyle = ink("focus");
      c.beginPath(); c.roundRect(x - 3, y - 3, w + 6, h + 6, 6); c.stroke();
    }
  }

  edge(c, n, state, chosen, top, bottom) {
    const [x, y, , h] = this.box(n), [px, py, pw] = this.box(this.tree.parent[n]);
    if (Math.max(y, py) + h < top || Math.min(y, py) > bottom) return;
    c.strokeStyle = chosen ? ink("focus") : state === "trunk" ? ink("trunk") : state === "gone" ? ink("gone-edge") : ink(`${state}-edge`);
    c.lineWidth = Math.max(0.6, (chosen || state === "trunk" ? 2.5 : 1.3) * Math.min(1, shown.size));
    c.beginPath();
    c.moveTo(px + pw, py + h / 2);
    const middle = (px + pw + x) / 2;
    c.bezierCurveTo(middle, py + h / 2, middle, y + h / 2, x, y + h / 2);
    c.stroke();
  }

  cell(c, n, state, x, y, w, h) {
    const {tree} = this, {size, step} = shown;
    const isNew = tree.born[n] === step && n && step;
    c.fillStyle = ink(state); c.strokeStyle = ink(`${state}-edge`);
    c.lineWidth = (isNew ? 2.4 : 1) * Math.min(1, size);
    c.setLineDash(state === "frontier" ? [4, 3] : []);
    c.beginPath(); c.roundRect(x, y, w, h, 4 * size); c.fill(); c.stroke();
    c.setLineDash([]);
    if (this.textless) return;
    if (tree.evaluated[n] !== null && tree.evaluated[n] <= step && ["live", "draft", "accepted"].includes(state)) {  // the colour of its slot
      c.fillStyle = slotInk(tree, n);
      c.fillRect(x + 2 * size, y + 4 * size, 3 * size, h - 8 * size);
    }
    const amount = this.amount(n);
    if (amount !== null) {
      c.fillStyle = ink("chance"); c.globalAlpha = state === "gone" ? 0.35 : 1;
      c.fillRect(x + 4 * size, y + h - 3.5 * size, (w - 8 * size) * amount, 2.5 * size);
      c.globalAlpha = 1;
    }
    c.fillStyle = ink(`${state}-ink`);
    c.font = `${isNew ? "600 " : ""}${12 * size}px ${FONT}`;
    c.textBaseline = "middle";
    const sign = tree.sign(n, state), start = x + 9 * size + (sign ? 12 * size : 0);
    if (sign) c.fillText(sign, x + 8 * size, y + h / 2);
    const text = n === this.plan.start ? this.trunkText() : tree.text(n);
    c.fillText(fitted(c, text, x + w - start - 4 * size, n === this.plan.start), start, y + h / 2 - size);
    if (state === "dropped" || state === "rejected") {  // struck through
      c.strokeStyle = ink(`${state}-ink`); c.lineWidth = 1; c.beginPath();
      c.moveTo(start, y + h / 2); c.lineTo(x + w - 6 * size, y + h / 2); c.stroke();
    }
  }

  /** A node's probability, or its score scaled to [0, 1]. */
  amount(n) {
    const {scores, scoreRange, logp} = this.tree;
    if (logp[n] !== null && n) return Math.exp(logp[n]);
    if (scores[n] === undefined || !scoreRange) return null;
    return (scores[n] - scoreRange[0]) / (scoreRange[1] - scoreRange[0] || 1);
  }

  trunkText() {
    const {tree, plan} = this, joined = tree.depth[plan.start];
    return `${tree.prompt_tokens}${joined ? `+${joined}` : ""} tokens …${readable((tree.prompt + tree.line(plan.start, 12)).slice(-24))}`;
  }

  tip() { return shown.view === "live" ? this.plan.start : this.tree.children[0][0] !== undefined && this.has(this.tree.children[0][0]) ? this.tree.children[0][0] : 0; }

  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left + this.scroll.scrollLeft, y = event.clientY - bounds.top + this.scroll.scrollTop;
    const d = this.x.findLastIndex(left => left <= x + 2);
    return this.plan.columns[d]?.find(n => {
      const [left, top, w, h] = this.box(n);
      return this.has(n) && x <= left + w + 2 && y >= top - 2 && y <= top + h + 2;
    });
  }

  drag() {
    let from = null;
    this.scroll.addEventListener("pointerdown", e => {
      if (e.button || e.target !== this.space && e.target !== this.scroll || e.pointerType === "touch") return;
      from = [e.clientX, e.clientY, this.scroll.scrollLeft, this.scroll.scrollTop, false];
    });
    this.scroll.addEventListener("pointermove", e => {
      if (!from) { this.scroll.title = ""; const n = this.at(e); if (n !== undefined) this.scroll.title = this.tree.describe(n, shown.step); return; }
      if (Math.abs(e.clientX - from[0]) + Math.abs(e.clientY - from[1]) > 4) from[4] = true;
      if (from[4]) this.scroll.scrollTo(from[2] + from[0] - e.clientX, from[3] + from[1] - e.clientY);
    });
    addEventListener("pointerup", () => { setTimeout(() => { from = null; }); });
    this.scroll.addEventListener("click", e => {
      if (from?.[4]) return;
      const n = this.at(e);
      if (n !== undefined) choose(this.tree.index, n, {still: true});
    });
    this.scroll.addEventListener("wheel", e => { if (e.ctrlKey) { e.preventDefault(); resize(shown.size * (e.deltaY < 0 ? 1.15 : 1 / 1.15)); } }, {passive: false});
  }

  /** Scroll to a node, with room on its right. */
  reveal(n) {
    if (!this.open || !this.plan?.row.has(n)) return;
    const [x, y, w, h] = this.box(n), s = this.scroll;
    const left = x < s.scrollLeft + 20 || x + w > s.scrollLeft + s.clientWidth * 0.85 ? x - s.clientWidth * 0.6 : s.scrollLeft;
    const top = y < s.scrollTop || y + h > s.scrollTop + s.clientHeight ? y - s.clientHeight / 2 : s.scrollTop;
    if (left !== s.scrollLeft || top !== s.scrollTop) s.scrollTo({left, top, behavior: CALM.matches || shown.playing || !document.documentElement.dataset.ready ? "auto" : "smooth"});
  }

  /** Describe the chosen node and its neighbours to screen readers. */
  describe() {
    const {tree} = this, n = shown.node, step = shown.step;
    const mine = shown.tree === tree.index && n >= 0 && tree.known[n] <= step;
    const seen = list => list.filter(m => this.has(m));
    const around = (list, m) => { const i = Math.max(0, list.indexOf(m) - NEAREST / 2); return list.slice(i, i + NEAREST); };
    const siblings = mine && n ? seen(tree.children[tree.parent[n]]) : [];
    const nodes = mine ? [...(n ? [tree.parent[n]] : []), ...(n ? around(siblings, n) : [0]), ...seen(tree.children[n]).slice(0, NEAREST)] : [0];
    this.items.replaceChildren(...[...new Set(nodes)].map(m => {
      const list = m ? seen(tree.children[tree.parent[m]]) : [0];
      const item = make("div", {id: `t${tree.index}n${m}`, role: "treeitem", "aria-level": tree.depth[m] + 1, "aria-posinset": list.indexOf(m) + 1,
        "aria-setsize": list.length, "aria-selected": m === n && mine, "aria-label": tree.describe(m, step)});
      if (seen(tree.children[m]).length) item.setAttribute("aria-expanded", true);
      return item;
    }));
    mine ? this.scroll.setAttribute("aria-activedescendant", `t${tree.index}n${n}`) : this.scroll.removeAttribute("aria-activedescendant");
  }
}

const widths = new Map();  // of texts, in pixels at size 1
function fitted(c, text, room, end = false) {
  if (c.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && c.measureText(letters.join("") + "…").width > room) end ? letters.shift() : letters.pop();
  return end ? "…" + letters.join("") : letters.join("") + "…";
}

// --- changes ---

function load(index) {
  request = file.requests[index];
  shown.request = index;
  trees = request.trees.map((_, i) => new Tree(request, i));
  const used = trees.map((tree, i) => i === 0 || tree.real > 1 && trees.findIndex(t => t.model === tree.model && t.real > 1) === i);
  panels = trees.map((tree, i) => new Panel(tree, used[i]));
  byId("trees").replaceChildren(...panels.map(panel => panel.element));
  shown.node = -1;
  shown.tree = 0;
  const last = Math.max(0, request.steps.length - 1);
  byId("step").max = last;
  const params = Object.entries(request.params).filter(([, value]) => value !== null && value !== "").map(([key, value]) => `${key} ${value}`);
  byId("title").textContent = `${request.search}${request.name === "" ? "" : ` · ${request.name}`} · ${request.models.target || ""}`;
  byId("title").title = params.join(", ");
  const notes = [];
  if (request.truncated) notes.push(`The record ends with step ${last} of ${request.truncated.steps - 1}: the search grew more than ${figure(request.truncated.nodes)} nodes.`);
  if (request.end !== "done") notes.push(`The search did not end by itself: ${request.end}.`);
  if (request.outputs.some(o => o.finish_reason === "interrupted")) notes.push("The search was interrupted.");
  if (request.restarts) notes.push(`The search was preempted ${plural(request.restarts, "time")} because the cache was full; this is its last run.`);
  if (file.left_out) notes.push(`${plural(file.left_out, "earlier request")} left out, to keep this page small.`);
  byId("notice").textContent = notes.join(" ");
  byId("notice").hidden = !notes.length;
  counts = request.steps.map(() => ({grown: 0, evaluated: 0, dropped: 0, rejected: 0, accepted: 0, "joined the trunk": 0, held: 0}));
  for (const tree of trees) for (let n = 1; n < tree.real; n++) {
    counts[tree.born[n]].grown++;
    if (tree.evaluated[n] !== null) counts[tree.evaluated[n]].evaluated++;
    if (tree.dropped[n] !== null) counts[tree.dropped[n]][tree.rejected(n) ? "rejected" : "dropped"]++;
    if (tree.accepted[n] !== null) counts[tree.accepted[n]].accepted++;
    if (tree.settled[n] !== null) counts[tree.settled[n]]["joined the trunk"]++;
    if (tree.evaluated[n] !== null) {
      counts[tree.evaluated[n]].held++;
      const end = Math.min(tree.dropped[n] ?? Infinity, tree.settled[n] ?? Infinity, tree.ended ?? Infinity);
      if (end < counts.length) counts[end].held--;
    }
  }
  counts.slice(1).forEach((at, i) => { at.held += counts[i].held; });
  const params_ = params.length ? [["search", `${request.search}: ${params.join(", ")}`]] : [["search", request.search]];
  byId("totals").replaceChildren(tableOf([...params_, ...Object.entries(request.stats).map(([key, value]) =>
    [key.replaceAll("_", " "), Array.isArray(value) ? fitList(value) : figure(value)])]));
  byId("outputs").replaceChildren(request.outputs.length ? make("ol", {}, ...request.outputs.map((o, i) => make("li", {},
    pick(0, trees[0] ? trees[0].outputNodes[i] : -1, `${i + 1}. ${o.text ?? trees[0].line(trees[0].outputNodes[i], 400)}`),
    make("p", {}, [o.score === null ? "" : `score ${figure(o.score)}`, o.logprob === null ? "" : `logprob ${figure(o.logprob)}`, o.finish_reason].filter(Boolean).join(", "))))) : make("p", {}, "none"));
  byId("legend").replaceChildren(...legend());
  for (const id of ["first", "back", "play", "next", "last", "step"]) byId(id).disabled = !last;
}

const fitList = value => { const text = JSON.stringify(value); return text.length > 120 ? `${text.slice(0, 119)}…` : text; };

function legend() {
  const drafts = trees.some(tree => tree.drafts.size), ends = trees.some(tree => tree.known.some((at, n) => at < tree.born[n] || n >= tree.real));
  const frontier = trees.some(tree => tree.evaluated.some((at, n) => n < tree.real && (at === null || at > tree.born[n])));
  return Object.entries(STATES).filter(([state]) => (drafts || !["draft", "accepted", "rejected"].includes(state)) && (ends || state !== "end") && (frontier || state !== "frontier"))
    .map(([state, [words, sign]]) => {
      const swatch = make("i", {"aria-hidden": true}, sign);
      Object.assign(swatch.style, {background: `var(--${state})`, color: `var(--${state}-ink)`, borderColor: `var(--${state}-edge)`, borderStyle: state === "frontier" ? "dashed" : "solid"});
      return make("li", {}, swatch, words);
    }).concat(make("li", {}, "bold: new · bar below: probability or score"));
}

/** A button that chooses a node. */
function pick(tree, node, text, ...more) {
  const button = make("button", {className: "pick text", onclick: () => choose(tree, node)}, text, ...more);
  if (tree === shown.tree && node === shown.node) button.setAttribute("aria-current", "true");
  button.dataset.node = `${tree}.${node}`;
  return button;
}

function go(step, {quiet = false} = {}) {
  shown.step = Math.max(0, Math.min(request.steps.length - 1, step));
  byId("step").value = shown.step;
  const last = request.steps.length - 1, now = counts[shown.step];
  const sum = now ? Object.entries(now).filter(([key, count]) => key !== "held" && count).map(([key, count]) => `${count} ${key}`).join(", ") || "nothing changed" : "";
  byId("where").textContent = `step ${shown.step} of ${last}`;
  byId("step").setAttribute("aria-valuetext", `step ${shown.step} of ${last}: ${sum}`);
  const entry = request.steps[shown.step] || {info: {}, beams: []};
  const asks = entry.asks ? `${plural(entry.asks[1], "node")} of the ${trees[entry.asks[0]]?.model ?? "?"} tree` : "nothing: the end";
  const took = shown.step < last ? `${((request.steps[shown.step + 1].seconds - entry.seconds) * 1000).toFixed(1)} ms` : null;
  byId("happened").replaceChildren(make("p", {}, sum), tableOf([["asked for", asks], ["time taken", took],
    ["settled text", entry.settled ? plural(entry.settled, "token") : null], ...Object.entries(entry.info).filter(([, v]) => v !== null).map(([k, v]) => [k.replaceAll("_", " "), figure(v)])]));
  beams();
  for (const panel of panels) panel.refresh();
  byId("first").disabled = byId("back").disabled = shown.step === 0;
  byId("next").disabled = byId("last").disabled = shown.step === last;
  chart();
  cache();
  detail();
  if (!quiet) {
    for (const panel of panels) {
      const {born, real} = panel.tree, there = panel.plan.columns.flat().filter(n => n < real && born[n] <= shown.step);
      const latest = Math.max(...there.map(n => born[n])), fresh = there.filter(n => born[n] === latest);
      if (fresh.length) panel.reveal(fresh.reduce((a, b) => panel.plan.row.get(b) < panel.plan.row.get(a) ? b : a));
    }
    if (!shown.playing) say(`Step ${shown.step} of ${last}: ${sum}`);
  }
  remember();
}

/** Show the candidates of the latest report. */
function beams() {
  let at = shown.step;
  while (at > 0 && !request.steps[at].beams.length) at--;
  const reported = request.steps[at]?.beams || [], text = tail => tail.map(token => trees[0].texts[token] ?? `#${token}`).join("");
  const rows = reported.map(([score, node, tail]) => make("tr", {}, make("td", {className: "n"}, score === null ? "" : score.toFixed(4)),
    make("td", {}, pick(0, node, trees[0].line(node, 16) + text(tail)))));
  byId("h-beams").textContent = at === shown.step || !reported.length ? "Candidates" : `Candidates, reported at step ${at}`;
  byId("beams").replaceChildren(reported.length ? make("table", {}, make("tbody", {}, ...rows)) : make("p", {}, "none reported yet"));
}

function choose(tree, node, {still = false, quiet = false} = {}) {
  if (node === undefined || node < 0) return;
  const panel = panels[tree];
  shown.tree = tree;
  shown.node = node;
  if (!panel.open) panel.toggle();
  if (panel.tree.known[node] > shown.step) go(panel.tree.born[node], {quiet: true});
  if (!panel.plan.row.has(node)) { byId("view").value = shown.view = "whole"; }
  for (const other of panels) other.refresh();
  if (!still) panel.reveal(node);
  detail();
  cache();
  for (const button of document.querySelectorAll(".pick")) button.toggleAttribute("aria-current", false);
  for (const button of document.querySelectorAll(`.pick[data-node="${tree}.${node}"]`)) button.setAttribute("aria-current", "true");
  if (!quiet) say(panel.tree.describe(node, shown.step));
  remember();
}

function say(text) { byId("say").textContent = text; }

function resize(size) {
  shown.size = Math.max(0.12, Math.min(2.5, size));
  for (const panel of panels) panel.refresh();
  if (shown.node >= 0) panels[shown.tree].reveal(shown.node);
}

function fit() {
  const panel = panels[shown.tree], wide = panel.scroll.clientWidth - 20;
  for (shown.size = 1; shown.size > 0.12; shown.size /= 1.1) { panel.arrange(); if (parseFloat(panel.space.style.width) <= wide) break; }
  resize(shown.size);
}

function play(on) {
  clearInterval(shown.playing);
  shown.playing = 0;
  if (on) {
    if (shown.step === request.steps.length - 1) go(0);
    shown.playing = setInterval(() => { go(shown.step + 1); if (shown.step === request.steps.length - 1) play(false); }, 450);
  }
  byId("play").textContent = on ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", on ? "Pause" : "Play");
}

function press(event, panel) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const {tree} = panel, n = shown.tree === tree.index && panel.has(shown.node) ? shown.node : panel.tip();
  const list = n > 0 ? tree.children[tree.parent[n]].filter(m => panel.has(m)) : [n];
  const column = (panel.plan.columns[tree.depth[n] - tree.depth[panel.plan.start]] || []).filter(m => panel.has(m));
  const below = m => tree.children[m].find(c => panel.has(c));
  const end = () => { let m = n; while (below(m) !== undefined) m = below(m); return m; };
  const moves = {
    ArrowLeft: () => n > 0 && n !== panel.plan.start ? tree.parent[n] : n, ArrowRight: () => below(n) ?? n,
    ArrowUp: () => list[list.indexOf(n) - 1] ?? n, ArrowDown: () => list[list.indexOf(n) + 1] ?? n,
    PageUp: () => column[column.indexOf(n) - 1] ?? n, PageDown: () => column[column.indexOf(n) + 1] ?? n,
    Home: () => panel.plan.start, End: end,
  };
  const acts = {
    "[": () => go(shown.step - 1), "]": () => go(shown.step + 1), " ": () => play(!shown.playing),
    "+": () => resize(shown.size * 1.2), "=": () => resize(shown.size * 1.2), "-": () => resize(shown.size / 1.2), "0": fit,
    "{": () => go(tree.born[n]), "}": () => { const at = tree.dropped[n] ?? tree.settled[n]; if (at !== null) go(at); },
  };
  if (moves[event.key]) choose(tree.index, moves[event.key]());
  else if (acts[event.key]) acts[event.key]();
  else return;
  event.preventDefault();
}

// --- beside the tree ---

function detail() {
  const tree = trees[shown.tree], n = shown.node, step = shown.step;
  if (!tree || n < 0 || tree.known[n] > step) { byId("node").replaceChildren(make("p", {}, tree && n >= 0 ? `It comes at step ${tree.born[n]}.` : "Choose one in the tree.")); return; }
  const slot = [...tree.owners(step).slots].find(([, node]) => node === n)?.[0];
  const at = (name, value) => [name, value === null || value === undefined || value > step ? null : `step ${value}`];
  const rows = [
    ["token", make("span", {className: "text"}, n ? `${tree.text(n)}  (id ${tree.token[n]})` : `${plural(tree.prompt_tokens, "prompt token")}, ${tree.reused_tokens} of them reused`)],
    ["state", tree.words(n, step)],
    ["probability", tree.logp[n] === null ? null : `${percent(tree.logp[n])}  (log ${tree.logp[n].toFixed(3)})`],
    ["of its path", tree.total[n] === null || !n ? null : `log ${tree.total[n].toFixed(3)}`],
    ["score", tree.scores[n] === undefined ? null : tree.scores[n].toFixed(4)],
    ["text", n ? make("span", {className: "text"}, tree.line(n, 40)) : make("span", {className: "text"}, `…${tree.prompt.slice(-160)}`)],
    at(tree.drafts.has(n) ? "drafted" : "grown", n && n < tree.real ? tree.born[n] : null), at("evaluated", tree.evaluated[n]), at("accepted", tree.accepted[n]),
    at("joined the trunk", tree.settled[n]), at(tree.rejected(n) ? "rejected" : "dropped", tree.dropped[n]),
    ["slot", slot === undefined ? null : `${slot} (page ${Math.floor(slot / tree.page_size)})`],
  ];
  const next = tree.top[n] && tree.evaluated[n] !== null && tree.evaluated[n] < step || tree.top[n] && step === tree.lastStep ? tree.top[n] : null;
  const likely = next && make("table", {}, make("caption", {className: "dim"}, "next tokens, the likeliest"), make("tbody", {}, ...next.map(([token, logp]) => {
    const child = tree.children[n].find(c => tree.token[c] === token && tree.known[c] <= step);
    const bar = make("span", {className: "bar"});
    bar.style.width = `${Math.max(1, 80 * Math.exp(logp))}px`;
    return make("tr", {}, make("td", {}, child === undefined ? make("span", {className: "text"}, tree.word(token)) : pick(tree.index, child, tree.word(token))),
      make("td", {className: "n"}, percent(logp)), make("td", {}, bar), make("td", {}, child === undefined ? "" : tree.words(child, step)));
  })));
  byId("node").replaceChildren(tableOf(rows), ...(likely ? [likely] : []));
}

/** Show the slots of every pool of the trees, page by page. */
function cache() {
  const models = [...new Set(trees.map(tree => tree.model))];
  byId("cache").replaceChildren(...models.map(model => {
    const mine = trees.filter(tree => tree.model === model), size = mine[0].page_size;
    const pages = [...new Set(mine.flatMap(tree => [...tree.pages.map(event => event[2]).filter(page => page >= 0), ...tree.slots.map(event => Math.floor(event[1] / size))]))].sort((a, b) => a - b);
    const owner = new Map();
    let trunk = 0, branches = 0;
    for (const tree of mine) {
      const owners = tree.owners(shown.step);
      for (let i = 0; i < owners.cached; i++) owner.set(owners.pages[Math.floor(i / size)] * size + i % size, [tree, -1]);
      for (const [slot, node] of owners.slots) owner.set(slot, [tree, node]);
      trunk += owners.cached;
      branches += owners.slots.size;
    }
    const held = new Set([...owner.keys()].map(slot => Math.floor(slot / size))).size;
    const holds = size > 1 ? `${plural(held, "page")} of ${size} slots, ${held * size - trunk - branches} of them free` : plural(held, "slot");
    const words = `${model}: ${holds}; ${trunk} in the trunk, ${branches} in branches`;
    const cell = 8, gap = size > 1 ? 8 : 0, wide = Math.max(1, Math.floor((byId("cache").clientWidth - 20) / (size * cell + gap))), lines = Math.ceil(pages.length / wide);
    const canvas = make("canvas", {role: "img", "aria-label": words}), ratio = devicePixelRatio || 1;
    const W = wide * (size * cell + gap), H = Math.max(1, lines * (cell + 4));
    canvas.width = W * ratio; canvas.height = H * ratio;
    canvas.style.width = `${W}px`; canvas.style.height = `${H}px`;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    const place = slot => { const i = pages.indexOf(Math.floor(slot / size)); return [(i % wide) * (size * cell + gap) + (slot % size) * cell, Math.floor(i / wide) * (cell + 4) + 1]; };
    pages.forEach((page, i) => {
      for (let s = 0; s < size; s++) {
        const own = owner.get(page * size + s), x = (i % wide) * (size * cell + gap) + s * cell, y = Math.floor(i / wide) * (cell + 4) + 1;
        c.fillStyle = !own ? ink("slot") : own[1] < 0 ? byId("owner").value === "tree" ? hue(own[0].index + 1) : ink("trunk") : slotInk(...own);
        c.fillRect(x, y, cell - 1, cell);
        if (own && own[0].index === shown.tree && own[1] >= 0 && own[1] === shown.node) { c.strokeStyle = ink("focus"); c.lineWidth = 2; c.strokeRect(x - 0.5, y - 0.5, cell, cell + 1); }
      }
    });
    canvas.onclick = e => {
      for (const [slot, [tree, node]] of owner) {
        const [x, y] = place(slot);
        if (e.offsetX >= x && e.offsetX < x + cell && e.offsetY >= y - 1 && e.offsetY <= y + cell) choose(tree.index, node < 0 ? tree.root(shown.step) : node);
      }
    };
    return make("div", {}, make("p", {}, words), make("div", {className: "slots", tabIndex: H > 240 ? 0 : -1}, canvas));
  }));
}

/** Draw the numbers of live and of dropped nodes by step, above the slider. */
function chart() {
  const canvas = byId("chart"), ratio = devicePixelRatio || 1, W = canvas.clientWidth, H = canvas.clientHeight;
  canvas.width = W * ratio; canvas.height = H * ratio;
  const c = canvas.getContext("2d"), n = counts.length, most = Math.max(1, ...counts.map(at => at.held + at.dropped + at.rejected));
  c.scale(ratio, ratio);
  const x = i => n > 1 ? i * W / (n - 1) : 0, bar = Math.max(1, W / Math.max(1, n - 1) - 1);
  counts.forEach((at, i) => {
    const held = at.held / most * (H - 2), lost = (at.dropped + at.rejected) / most * (H - 2);
    c.fillStyle = ink(i === shown.step ? "focus" : "live-edge"); c.globalAlpha = i <= shown.step ? 1 : 0.45;
    c.fillRect(x(i) - bar / 2, H - held, bar, held);
    c.fillStyle = ink("dropped-edge");
    c.fillRect(x(i) - bar / 2, H - held - lost, bar, lost);
  });
  c.globalAlpha = 1;
}

// --- the address ---

function remember() {
  const at = new URLSearchParams({request: shown.request, step: shown.step, view: shown.view, ...(shown.node >= 0 ? {tree: shown.tree, node: shown.node} : {})});
  try { history.replaceState(null, "", `#${at}`); } catch { /* some browsers do not allow it for files */ }
}

function recall() {
  const at = new URLSearchParams(location.hash.slice(1));
  const number = (key, or, most) => { const x = Number(at.get(key) ?? or); return Number.isInteger(x) && x >= 0 && x <= most ? x : or; };
  load(number("request", 0, file.requests.length - 1));
  byId("request").value = shown.request;
  byId("view").value = shown.view = at.get("view") === "live" ? "live" : "whole";
  if (at.has("size")) shown.size = Math.max(0.12, Math.min(2.5, Number(at.get("size")) || 1));
  const last = request.steps.length - 1, asked = at.has("step");
  go(number("step", Math.max(0, last), Math.max(0, last)), {quiet: !asked});
  const tree = number("tree", 0, trees.length - 1);
  if (at.has("node") && trees.length) choose(tree, number("node", 0, trees[tree].token.length - 1));
}

// --- start ---

byId("first").onclick = () => go(0);
byId("back").onclick = () => go(shown.step - 1);
byId("next").onclick = () => go(shown.step + 1);
byId("last").onclick = () => go(request.steps.length - 1);
byId("play").onclick = () => play(!shown.playing);
byId("step").oninput = event => { play(false); go(Number(event.target.value)); };
byId("view").onchange = event => { shown.view = event.target.value; go(shown.step); };
byId("owner").onchange = () => go(shown.step, {quiet: true});
byId("smaller").onclick = () => resize(shown.size / 1.25);
byId("larger").onclick = () => resize(shown.size * 1.25);
byId("fit").onclick = fit;
byId("request").onchange = event => { play(false); load(Number(event.target.value)); go(request.steps.length - 1, {quiet: true}); };
addEventListener("resize", () => chart());
addEventListener("hashchange", recall);
DARK.addEventListener("change", () => { inks = {}; go(shown.step, {quiet: true}); });

if (!file.requests.length) {
  byId("title").textContent = "coppice: no request was answered";
  byId("player").hidden = true;
  document.querySelector("main").hidden = true;
} else {
  byId("pick").hidden = file.requests.length < 2;
  byId("request").append(...file.requests.map((r, i) => make("option", {value: i}, `${i + 1}: ${r.name === "" ? r.search : r.name}`)));
  recall();
  document.documentElement.dataset.ready = "true";
}
