// Where everything stands on the canvas: a ring, or hosts as boxes.

const nHosts = Math.max(...trace.hosts) + 1;
const depth = Math.max(1, ...contributions.map((ranks) => ranks.length));
const columns = trace.places.map((places) => {
  // Gaps between buffers, in columns.
  let x = 0;
  return places.map(([buffer], i) => {
    if (i && places[i - 1][0] !== buffer) x += 0.6;
    return x++;
  });
});
const nColumns = Math.max(...columns.map((xs) => (xs.length ? xs[xs.length - 1] + 1 : 1)));
const aspect = Math.min(2.1, Math.max(0.95, (nColumns / depth) * 1.25));
// True if places belong to several buffers, which the drawing separates.
const hasGroups = trace.places.some((places) => places.some(([buffer]) => buffer !== "data"));
let cards = [];
let boxes = [];

function fits(cards_, gap) {
  return cards_.every((a, i) => cards_.every((b, j) => j <= i ||
    Math.abs(a.x - b.x) >= a.w + gap || Math.abs(a.y - b.y) >= a.h + gap));
}

/** Cards of height h on a ring, equally far apart, rank 0 on top. Many make it squarer. */
function onRing(n, width, height, h) {
  const w = h * aspect, margin = h < 34 ? 16 : 8, nSteps = 4000;
  const b = height / 2 - h / 2 - margin, a = width / 2 - w / 2 - margin;
  const across = n > 10 ? a : Math.min(a, b * 1.9), power = n > 10 ? 0.75 : 1;
  const at = (step) => {
    const t = (n === 2 ? Math.PI : -Math.PI / 2) + step * 2 * Math.PI / nSteps;
    const c = Math.cos(t), s = Math.sin(t);
    return [Math.sign(c) * Math.abs(c) ** power * across, Math.sign(s) * Math.abs(s) ** power * b];
  };
  const lengths = [0];
  for (let step = 1; step <= nSteps; step++) {
    const [x0, y0] = at(step - 1), [x1, y1] = at(step);
    lengths.push(lengths[step - 1] + Math.hypot(x1 - x0, y1 - y0));
  }
  let step = 1;
  return Array.from({ length: n }, (_, rank) => {
    const along = lengths[nSteps] * rank / n;
    while (lengths[step] < along) step++;
    const part = (along - lengths[step - 1]) / (lengths[step] - lengths[step - 1]);
    const [x0, y0] = at(step - 1), [x1, y1] = at(step);
    const [x, y] = n === 1 ? [0, 0] : [x0 + (x1 - x0) * part, y0 + (y1 - y0) * part];
    return { x: width / 2 + x, y: height / 2 + y, w, h };
  });
}

function ringLayout(n, width, height) {
  let small = 4, large = Math.min(height * (n < 3 ? 0.4 : 0.3), width * (n < 3 ? 0.26 : 0.4) / aspect);
  for (let i = 0; i < 24; i++) {
    const h = (small + large) / 2;
    if (fits(onRing(n, width, height, h), h * 0.22)) small = h; else large = h;
  }
  return [onRing(n, width, height, small), []];
}

/** Hosts as boxes, their ranks in rows, so that equal local ranks stand below each other. */
function hostLayout(width, height) {
  const local = Array.from({ length: nHosts }, () => []);
  trace.hosts.forEach((host, rank) => local[host].push(rank));
  const widest = Math.max(...local.map((ranks) => ranks.length)), head = 22;
  let best = null;
  for (let across = 1; across <= nHosts; across++) {
    for (let perRow = 1; perRow <= widest; perRow++) {
      // In cards: 0.3 of one between cards and around them, half of one between boxes.
      const down = Math.ceil(nHosts / across), rows = Math.ceil(widest / perRow);
      const boxW = perRow * 1.3 + 0.3, boxH = rows * 1.3 + 0.3;
      const h = Math.min(width / (across * (boxW + 0.5) - 0.5) / aspect,
        (height - down * head) / (down * (boxH + 0.5) - 0.5), height * 0.28);
      const straight = rows === 1 && across === 1 ? 1.35 : 1;  // rails are best seen straight
      if (!best || h * straight > best.score) {
        best = { across, perRow, down, boxW, boxH, h, score: h * straight };
      }
    }
  }
  const { across, perRow, down, h } = best, w = h * aspect;
  const box = { w: best.boxW * w - 2, h: best.boxH * h + head - 2 };
  const gap = (room, n, one, most) => (n > 1 ? Math.min(most, (room - n * one) / (n - 1)) : 0);
  const gapX = gap(width - 2, across, box.w, 1.2 * w), gapY = gap(height - 2, down, box.h, 2 * h);
  const left = (width - across * (box.w + gapX) + gapX) / 2;
  const top = (height - down * (box.h + gapY) + gapY) / 2;
  const cards_ = [], boxes_ = [];
  local.forEach((ranks, host) => {
    const x = left + (host % across) * (box.w + gapX);
    const y = top + Math.floor(host / across) * (box.h + gapY);
    boxes_.push({ x, y, ...box, label: `host ${host}` });
    ranks.forEach((rank, i) => {
      const column = i % perRow, row = Math.floor(i / perRow);
      cards_[rank] = { x: x + (0.8 + column * 1.3) * w, y: y + head + (0.7 + row * 1.3) * h, w, h };
    });
  });
  return [cards_, boxes_];
}

/** The bar of a place: where it stands on the canvas, and whether its name fits below it. */
function bar(rank, place) {
  const card = cards[rank], pad = Math.max(1, card.h * 0.08), label = labelHeight(card);
  const pitch = (card.w - 2 * pad) / nColumns;
  const width = pitch * (pitch > 8 ? 0.84 : pitch > 3 ? 0.9 : 1);
  const used = columns[rank].length ? columns[rank][columns[rank].length - 1] + 1 : 1;
  const x = card.x - (used * pitch) / 2 + columns[rank][place] * pitch + (pitch - width) / 2;
  const names = width >= 11 && card.h > 70 ? (hasGroups ? 28 : 14) : 0;
  const y = card.y - card.h / 2 + label, h = card.h - label - pad - names;
  return { x, y, w: width, h, isNamed: names > 0 };
}

const labelHeight = (card) => (card.h >= 34 ? Math.min(24, Math.max(12, card.h * 0.24)) : 2);
