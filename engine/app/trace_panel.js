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

