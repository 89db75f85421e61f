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
