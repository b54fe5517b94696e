// Draws the ranks, what they hold and the messages on their way.

const canvas = $("canvas"), screen_ = canvas.getContext("2d");
// What holds still is drawn once: the cards, and the arrows of one round.
const [kept, arrows] = ["canvas", "canvas"].map((name) => document.createElement(name));
let theme = {}, colours = [], size = { width: 0, height: 0 }, isKeptDrawn = false, arrowsRound = null;
const bends = new Map();  // by sender and receiver


/** The drawing context of a canvas, in pixels of the page. */
function contextOf(one) {
  const context = one.getContext("2d"), ratio = one.width / size.width;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function restyle() {
  isKeptDrawn = false;
  arrowsRound = null;
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "well", "line", "ink", "soft", "paper", "accent", "good", "mono"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  const [light, chroma] = ["--light", "--chroma"].map((name) => +style.getPropertyValue(name));
  // Round the circle of hues, not quite to its end: rank 0 and the last one stay apart.
  colours = Array.from({ length: trace.ranks }, (_, rank) => {
    const hue = 250 + 360 * rank / Math.max(trace.ranks, 3);
    return `oklch(${light} ${chroma} ${hue % 360})`;
  });
}

function resize() {
  const { width, height } = $("stage").getBoundingClientRect(), ratio = devicePixelRatio || 1;
  size = { width, height };
  for (const one of [canvas, kept, arrows]) [one.width, one.height] = [width * ratio, height * ratio];
  [cards, boxes] = nHosts > 1 ? hostLayout(width, height) : ringLayout(trace.ranks, width, height);
  bends.clear();
  restyle();
}

function rounded(context, x, y, w, h, radius) {
  context.beginPath();
  context.roundRect(x, y, w, h, Math.min(radius, w / 2, h / 2));
}

/** A value as a stack of the ranks that contributed, the first at the bottom. */
function drawStack(context, value, { x, y, w, h }, most = Infinity) {
  const ranks = contributions[value], slot = h / depth;
  if (slot <= 5) return drawThinStack(context, ranks, { x, y, w, h }, most);
  ranks.forEach((rank, i) => {
    const top = y + h - (i + 1) * slot;
    context.fillStyle = colours[rank];
    rounded(context, x, top + 1, w, slot - 1, Math.min(2.5, slot / 5));
    context.fill();
    if (slot >= 13 && w >= 13) {
      context.fillStyle = "rgb(20 22 26 / 0.78)";
      text(context, rank, x + w / 2, top + slot / 2 + 0.5, Math.min(w > 60 ? 16 : 12, slot * 0.62), "center");
    }
  });
}

/** Where a piece would be less than a pixel, one stands for its neighbours; `most` of them. */
function drawThinStack(context, ranks, { x, y, w, h }, most) {
  const filled = h * ranks.length / depth;
  const n = Math.max(1, Math.min(ranks.length, Math.ceil(filled), most));
  for (let i = 0; i < n; i++) {
    context.fillStyle = colours[ranks[Math.floor((i + 0.5) * ranks.length / n)]];
    context.fillRect(x, y + h - (i + 1) * filled / n, w, filled / n + 0.3);
  }
}

function text(context, words, x, y, pixels, align, weight = 500) {
  context.font = `${weight} ${pixels}px system-ui, "Segoe UI", "DejaVu Sans", sans-serif`;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillText(words, x, y);
}

function drawCard(context, rank) {
  const card = cards[rank], { x, y, w, h } = card, label = labelHeight(card);
  context.fillStyle = theme.card;
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  rounded(context, x - w / 2, y - h / 2, w, h, Math.min(9, h * 0.1));
  context.fill();
  context.stroke();
  if (label > 2) nameCard(context, rank, label);
  else if (rank % 4 === 0) nameBeside(context, rank);
  const { places } = trace, n = places[rank].length;
  if (n && bar(rank, 0).w <= 4) {
    const [first, last] = [bar(rank, 0), bar(rank, n - 1)];
    context.fillStyle = theme.well;
    context.fillRect(first.x, first.y, last.x + last.w - first.x, first.h);
  }
  places[rank].forEach(([, chunk], place) => drawPlace(context, rank, place, chunk));
  if (hasGroups && n) nameGroups(context, rank);
}

function nameCard(context, rank, label) {
  const { x, y, w, h } = cards[rank], pixels = Math.min(13, label * 0.62);
  const name = h > 90 && w > 90 ? `rank ${rank}` : `${rank}`, middle = y - h / 2 + label / 2 + 2;
  context.fillStyle = theme.ink;
  text(context, name, x + pixels * 0.4, middle, pixels, "center", 550);
  const left = x + pixels * 0.4 - context.measureText(name).width / 2 - pixels * 0.62;
  context.fillStyle = colours[rank];
  context.beginPath();
  context.arc(left, middle - pixels * 0.04, pixels * 0.3, 0, 2 * Math.PI);
  context.fill();
}

/** The name of a rank whose card is too small for it: on the side of the middle. */
function nameBeside(context, rank) {
  const { x, y, w, h } = cards[rank];
  const dx = size.width / 2 - x, dy = size.height / 2 - y, far = Math.hypot(dx, dy) || 1;
  context.fillStyle = theme.soft;
  text(context, rank, x + dx / far * (w / 2 + 12), y + dy / far * (h / 2 + 11), 11, "center");
}

function drawPlace(context, rank, place, chunk) {
  const at = bar(rank, place), value = held[rank][place];
  if (at.w > 4) {
    context.fillStyle = theme.card;
    context.fillRect(at.x - 0.5, at.y - 1, at.w + 1, at.h + 1 + (at.isNamed ? 16 : 1));
    context.fillStyle = theme.well;
    rounded(context, at.x, at.y, at.w, at.h, 2.5);
    context.fill();
  }
  // Thin bars share pixels: a little wider, they do not pale.
  if (value !== null) drawStack(context, value, at.w > 4 ? at : { ...at, w: at.w + 0.4 });
  const name = underName(rank, place, chunk, value);
  if (!at.isNamed || at.w <= 8 * name.length) return;
  const done = isKept(rank, place), middle = at.x + at.w / 2;
  context.fillStyle = done ? theme.good : theme.soft;
  text(context, name, middle, at.y + at.h + 9, 11, "center", done ? 700 : 400);
}

/** What stands under a bar. Scratch has no order: there it is the chunk that is held just now. */
function underName(rank, place, chunk, value) {
  const [buffer] = trace.places[rank][place];
  if (buffer === "data") return letter(chunk);
  return buffer === "scratch" ? (value === null ? "" : letter(trace.values[value][0])) : `${chunk}`;
}

/** The names of the buffers, each below the middle of its bars. */
function nameGroups(context, rank) {
  const places = trace.places[rank], one = bar(rank, 0);
  context.fillStyle = theme.soft;
  for (const buffer of ["input", "output", "scratch"]) {
    const of = places.flatMap(([name], place) => (name === buffer ? [bar(rank, place)] : []));
    if (!of.length || !one.isNamed) continue;
    const last = of[of.length - 1], middle = (of[0].x + last.x + last.w) / 2;
    text(context, buffer, middle, one.y + one.h + 23, 10.5, "center", 400);
  }
}

/** Everything that holds still while messages fly; only what has changed, if it can be. */
function drawKept() {
  const context = contextOf(kept);
  if (isKeptDrawn) {
    const changed = [...undrawn].map((key) => key.split(" ").map(Number));
    // Thin bars share pixels with their neighbours, so all of them are drawn again.
    const [apart, shared] = [[], new Set()];
    for (const [rank, place] of changed) {
      if (bar(rank, place).w > 4) apart.push([rank, place]); else shared.add(rank);
    }
    shared.forEach((rank) => drawCard(context, rank));
    for (const [rank, place] of apart) {
      drawPlace(context, rank, place, trace.places[rank][place][1]);
    }
  } else {
    context.clearRect(0, 0, size.width, size.height);
    for (const { x, y, w, h, label } of boxes) {
      context.strokeStyle = theme.line;
      context.lineWidth = 1;
      rounded(context, x, y, w, h, 14);
      context.stroke();
      context.fillStyle = theme.soft;
      text(context, label, x + 14, y + 15, 12, "left");
    }
    cards.forEach((_, rank) => drawCard(context, rank));
  }
  isKeptDrawn = true;
  undrawn.clear();
}

/** The way of a message from a to b: a little to the right, so that two ways do not meet. */
function way(a, b, bend) {
  const dx = b.x - a.x, dy = b.y - a.y;
  const cx = (a.x + b.x) / 2 - dy * bend, cy = (a.y + b.y) / 2 + dx * bend;
  return (t) => ({
    x: (1 - t) ** 2 * a.x + 2 * t * (1 - t) * cx + t * t * b.x,
    y: (1 - t) ** 2 * a.y + 2 * t * (1 - t) * cy + t * t * b.y,
  });
}

const inside = (point, card, more) =>
  Math.abs(point.x - card.x) < card.w / 2 + more && Math.abs(point.y - card.y) < card.h / 2 + more;

/** How far a way turns aside: further if another card stands in between. */
function bendOf(sender, receiver) {
  const key = sender * trace.ranks + receiver, a = cards[sender], b = cards[receiver];
  if (!bends.has(key)) {
    const straight = way(a, b, 0), points = [0.2, 0.35, 0.5, 0.65, 0.8].map(straight);
    const others = cards.filter((card) => card !== a && card !== b);
    const blocked = boxes.length && others.some((card) => points.some((at) => inside(at, card, 0)));
    const far = Math.hypot(b.x - a.x, b.y - a.y);
    const aside = Math.abs(b.x - a.x) > Math.abs(b.y - a.y) ? a.h : a.w;
    bends.set(key, blocked ? Math.min(0.5, 1.5 * aside / far) : 0.13);
  }
  return bends.get(key);
}

const MANY = 400;  // messages of one round, from where on they are drawn with less care

function drawArrow(context, sender, receiver) {
  const a = cards[sender], b = cards[receiver], point = way(a, b, bendOf(sender, receiver));
  const points = [];
  for (let i = 0; i <= 60; i++) {
    const at = point(i / 60);
    if (!inside(at, a, 3) && !inside(at, b, 4)) points.push(at);
  }
  if (points.length < 2) return;
  const tip = points[points.length - 1], before = points[Math.max(0, points.length - 4)];
  context.beginPath();
  points.forEach(({ x, y }) => context.lineTo(x, y));
  context.stroke();
  const angle = Math.atan2(tip.y - before.y, tip.x - before.x), long = Math.min(8, 3 + b.h * 0.1);
  context.beginPath();
  context.moveTo(tip.x, tip.y);
  for (const side of [2.72, -2.72]) {
    context.lineTo(tip.x + long * Math.cos(angle + side), tip.y + long * Math.sin(angle + side));
  }
  context.fill();
}

/** The ways of a round's messages. Of very many only lines from card to card, in one stroke. */
function drawArrows(round) {
  const messages = trace.rounds[round].messages, drawn = new Set(), context = contextOf(arrows);
  context.clearRect(0, 0, size.width, size.height);
  context.strokeStyle = context.fillStyle = theme.soft;
  context.lineWidth = messages.length > MANY ? 0.5 : 1.2;
  context.globalAlpha = Math.min(0.75, Math.max(0.15, 24 / messages.length));
  context.beginPath();
  for (const [sender, , receiver] of messages) {
    const key = sender * trace.ranks + receiver, a = cards[sender], b = cards[receiver];
    if (drawn.has(key)) continue;
    drawn.add(key);
    if (messages.length > MANY) {
      context.moveTo(a.x, a.y);
      context.lineTo(b.x, b.y);
    } else drawArrow(context, sender, receiver);
  }
  if (messages.length > MANY) context.stroke();
  context.globalAlpha = 1;
  arrowsRound = round;
}

/** The messages of a round on their way, from 0 to 1. They land on top of each other. */
function drawMessages(round, flown) {
  const { messages } = trace.rounds[round], heights = new Map();
  // A shadow costs more than all the rest of a message.
  const lift = messages.length > MANY ? 0 : Math.sin(Math.PI * flown);
  screen_.shadowColor = `rgb(0 0 0 / ${0.3 * lift})`;
  screen_.shadowBlur = 9 * lift;
  screen_.shadowOffsetY = 3 * lift;
  for (const [sender, source, receiver, target, folds, value] of messages) {
    const from = bar(sender, source), to = bar(receiver, target);
    const key = `${receiver} ${target}`, before = held[receiver][target];
    const under = heights.get(key) ?? (folds && before !== null ? contributions[before].length : 0);
    heights.set(key, under + contributions[value].length);
    if (folds) to.y -= Math.min(under, depth - 1) * to.h / depth;
    const at = way(from, to, bendOf(sender, receiver))(flown);
    const mix = (name) => from[name] + (to[name] - from[name]) * flown;
    const goal = { x: at.x, y: at.y, w: Math.max(1.5, mix("w")), h: mix("h") };
    drawStack(screen_, value, goal, messages.length > MANY ? 6 : Infinity);
  }
  screen_.shadowColor = "transparent";
}

const FLIGHT = 0.78;  // of a round's time; for the rest, its end is shown
const ease = (t) => (t < 0.5 ? 4 * t ** 3 : 1 - (2 - 2 * t) ** 3 / 2);

function draw() {
  const round = Math.min(Math.floor(position), lastRound);
  const flown = Math.min(1, (position - round) / FLIGHT), flying = flown > 0 && flown < 1;
  const current = flown > 0 ? round + 1 : round;
  goToRound(flown === 1 ? round + 1 : round);
  if (!isKeptDrawn || undrawn.size) drawKept();
  if (arrowsRound !== current) drawArrows(current);
  contextOf(canvas).clearRect(0, 0, size.width, size.height);
  screen_.globalAlpha = flying ? 1 : 0.5;
  screen_.drawImage(arrows, 0, 0, size.width, size.height);
  screen_.globalAlpha = 1;
  screen_.drawImage(kept, 0, 0, size.width, size.height);
  if (flying) drawMessages(current, ease(flown));
  showWords(current);
}
